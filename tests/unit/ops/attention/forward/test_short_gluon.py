"""short_gluon: what it serves and suits, and on a GPU random small problems against the fp64 oracle."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.unit.ops.attention.calls import call_of
from tests.unit.ops.attention.forward.cases import Case, examine, problem_of

import flashmoe_science as fms
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.forward.short_gluon import KERNEL

H200, L4 = gpu_named("h200"), gpu_named("l4")
SEED, CASES = 20261123, 96


def random_cases() -> list[Case]:
    chance, found = Random(SEED), []
    for _ in range(CASES):
        keys = chance.randint(1, chance.choice((16, 64, 130, 256, 512)))
        mask = chance.choice(("", " causal", " causal", " causal-topleft"))
        queries = keys if chance.random() < 0.3 else chance.randint(1, chance.choice((1, 16, 40, 600)))
        heads_kv, dim = chance.randint(1, 3), chance.choice((8, 16, 40, 64, 64, 72, 96, 128))
        words = [f"attn b{chance.randint(1, 3)} h{heads_kv * chance.choice((1, 1, 2, 5))} hk{heads_kv}"]
        words += [f"q{queries} k{keys} d{dim} dv{chance.choice((dim, dim, 8, 64, 128))}"]
        words += [chance.choice(("fp16", "bf16")) + mask + chance.choice(("", " bshd"))]
        values = chance.choice(("normal", "normal", "normal", "large", "tiny", "opposed", "constant"))
        memory = "dense" if "bshd" in words[-1] else chance.choice(("dense", "dense", "cache", "packed"))
        scale = chance.choice((None, None, None, 0.3))
        found.append(Case(" ".join(words), scale, values, memory, chance.random() < 0.7))
    return found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("attn b1 h1 q128 d64 fp16", None),
        ("attn b1 h1 q9 k512 d64 bf16 causal", None),
        ("attn b1 h1 q9 k513 d64 bf16", "serves up to 512 keys of such heads, not 513"),
        ("attn b1 h1 q9 k256 d128 bf16", None),
        ("attn b1 h1 q9 k257 d128 bf16", "serves up to 256 keys of such heads, not 257"),
        ("attn b1 h1 q9 d136 bf16", "serves heads of up to 128, not 136"),
        ("attn b1 h1 q9 d60 bf16", "head_dim is 60; its copies need a multiple of 8"),
        ("attn b1 h1 q9 d64 fp32", "serves fp16 and bf16, not fp32"),
        ("attn b1 h1 q9 d64 bf16 causal left3", "it does not serve a sliding window"),
    ],
)
def test_what_it_serves_is_said_in_words(text: str, reason: str | None) -> None:
    assert KERNEL.supports(problem_of(Case(text)), H200) == reason


def test_it_serves_what_the_gpu_has_memory_for() -> None:
    assert (
        KERNEL.supports(problem_of(Case("attn b1 h1 q9 k512 d64 bf16")), L4) == "serves up to 256 keys of such heads, not 512"
    )


@pytest.mark.parametrize(
    ("text", "suits"),
    [
        ("attn b8 h4 q128 d64 fp16", True),  # 256 programs on 132 processors
        ("attn b8 h8 q128 d64 fp16", False),
        ("attn b1 h4 q512 d64 fp16", True),
        ("attn b2 h8 q512 d64 fp16", False),  # one program of so many keys fits a processor
    ],
)
def test_it_is_chosen_while_all_programs_run_at_once(text: str, suits: bool) -> None:
    assert KERNEL.suits(problem_of(Case(text)), H200) is suits


def test_random_cases_cover_what_it_meets() -> None:
    problems = [problem_of(case) for case in random_cases()]
    assert {problem.mask for problem in problems} == {"full", "causal", "causal-topleft"}
    assert {problem.dtype for problem in problems} == {"fp16", "bf16"}
    assert any(problem.causal and problem.seqlen_q > problem.seqlen_k for problem in problems)
    assert any(problem.seqlen_k in (64, 128, 256, 512) for problem in problems)
    assert {case.memory for case in random_cases()} == {"dense", "cache", "packed"}


@pytest.mark.gpu
@pytest.mark.parametrize("case", random_cases(), ids=str)
def test_it_is_right_on_random_problems(case: Case) -> None:
    problem, gpu = problem_of(case), current_gpu()
    if reason := KERNEL.supports(problem, gpu):
        pytest.skip(reason)
    for config in KERNEL.configs(problem, gpu):
        assert examine(KERNEL, config, case, torch.device("cuda")) == [], config


@pytest.mark.gpu
def test_it_refuses_in_words_what_it_cannot_copy_and_another_kernel_serves_it() -> None:
    problem = problem_of(Case("attn b1 h2 q40 d64 bf16"))
    config = KERNEL.configs(problem, H200)[0]

    def serve(one: torch.Tensor) -> None:
        KERNEL.run(call_of(problem, one, one, one, 0.125), config)

    wide, wider = (torch.randn(1, 2, 40, width, device="cuda", dtype=torch.bfloat16) for width in (65, 72))
    apart, shifted = wide[..., :64], wider[..., 4:68]
    for tensor, reason in (
        (apart, "query has stride 65 in dimension 2"),
        (shifted, "query does not start at a multiple"),
    ):
        with pytest.raises(CannotServe, match=reason):
            serve(tensor)
        reference = torch.nn.functional.scaled_dot_product_attention(*[tensor.double()] * 3)
        out = fms.scaled_dot_product_attention(tensor, tensor, tensor)
        assert (out.double() - reference).abs().max() < 2e-2


@pytest.mark.gpu
def test_a_launcher_refuses_more_keys_than_fit() -> None:
    problem = problem_of(Case("attn b1 h2 q40 d64 bf16"))
    q, k = (torch.randn(1, 2, rows, 64, device="cuda", dtype=torch.bfloat16) for rows in (40, 600))
    assert KERNEL.plan is not None
    launcher = KERNEL.plan(call_of(problem, q, q, q, 0.125), KERNEL.configs(problem, H200)[0])
    with pytest.raises(CannotServe, match="there are 600 keys; it serves up to 512"):
        launcher.bind(Tensors(q, k, k), Options())
