"""MoE problems: their text form, their cost by counting, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.problem import ProblemError

SIZES = st.integers(1, 12)


@st.composite
def problems(draw: st.DrawFn) -> MoEProblem:
    experts = draw(SIZES)
    return MoEProblem(
        tokens=draw(SIZES),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        dim=draw(SIZES),
        hidden=draw(SIZES),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
    )


@given(problems())
def test_the_text_form_reads_back(problem: MoEProblem) -> None:
    assert parse_problem(str(problem)) == problem
    assert problem.op == "moe"


@given(problems())
def test_flops_count_the_three_products_of_every_pair(problem: MoEProblem) -> None:
    up = gate = down = 2 * problem.dim * problem.hidden
    assert problem.flops() == sum(up + gate + down for _ in range(problem.tokens) for _ in range(problem.top_k))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 2), (2, 4), (100, 8)])
def test_bytes_count_no_expert_that_nothing_is_routed_to(tokens: int, experts: int) -> None:
    problem = parse_problem(f"moe t{tokens} e8 k2 d16 f4 bf16")
    weights = experts * (2 * 4 * 16 + 16 * 4) * 2
    routing = tokens * 2 * (4 + 4)
    assert problem.min_bytes() == 2 * tokens * 16 * 2 + weights + routing


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("moe t8 e4 k5 d16 f16", "top_k is 5 and experts is 4; top_k must be at most experts"),
        ("moe t8 e4 k2 d16", "lacks f<n>"),
        ("moe t8 e4 k2 d16 f16 causal", "unknown word 'causal'"),
        ("moe t0 e4 k2 d16 f16", "tokens is 0"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        parse_problem(text)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_our_attention_kernels_refuse_it_in_words() -> None:
    problem = parse_problem("moe t8 e4 k2 d16 f16 bf16")
    for kernel in operation("attention").kernels():
        assert kernel.cannot(problem, gpu_named("h200")) == "it computes attention, not moe"
