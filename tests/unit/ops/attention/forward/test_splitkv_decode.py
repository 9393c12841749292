"""decode_gluon: what it serves, and on a GPU random problems, lengths that change and what it must not read."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import Random

import pytest
import torch
from tests.unit.ops.attention.calls import call_of
from tests.unit.ops.attention.forward.features_cases import SLICED, Changed
from tests.unit.ops.attention.forward.random_features import RandomCase, judged

import flashmoe_science as fms
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.forward.splitkv.decode import KERNEL
from flashmoe_science.ops.attention.problem import AttentionProblem, parse

H200 = gpu_named("h200")
CASES, OF_A_BUILD = 256, 8


def attention(text: str) -> AttentionProblem:
    return parse(f"attn {text}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b1 h32 hk8 q1 k8192 d128 bf16", None),
        ("b1 h32 hk8 q4 k8192 d128 fp16 causal bshd ragged page16 leftpad", None),
        ("b1 h64 hk8 q1 k8192 d64 bf16 causal bshd left127 sinks ragged", None),
        ("b1 h32 hk8 q5 k8192 d128 bf16", "serves up to 16 rows (queries times heads that share a key head), not 20"),
        ("b1 h32 hk8 q1 k8192 d136 bf16", "serves heads of up to 128, not 136"),
        ("b1 h32 hk8 q1 k8192 d60 bf16", "head_dim is 60; its copies need a multiple of 8"),
        ("b1 h32 hk8 q1 k8192 d128 fp32", "serves fp16 and bf16, not fp32"),
        ("b1 h32 hk8 q2 k8192 d128 bf16 causal-topleft", "aligns its causal mask bottom-right"),
        ("b1 h32 hk8 q1 k8192 d128 bf16 softcap50", "it does not serve a soft cap"),
        ("b32 h32 hk8 q1 k8192 d128 bf16 bshd ragged", None),
    ],
)
def test_what_it_serves_is_said_in_words(text: str, reason: str | None) -> None:
    assert KERNEL.cannot(attention(text), H200) == reason


def decoding(number: int) -> RandomCase:
    """The case of a number: few rows over many keys. Eight in turn share a build and differ in sizes and values."""
    build, chance = Random(number // OF_A_BUILD), Random(f"sizes {number}")
    queries, group = build.choice(((1, 1), (1, 4), (1, 8), (1, 16), (2, 8), (3, 5), (4, 4), (16, 1)))
    heads_kv, dim = chance.randint(1, 3), build.choice((8, 40, 64, 64, 96, 128, 128))
    page = build.choice((0, 0, 1, 5, 16, 32, 64, 128, 256))
    kind = build.choice(("bhsd", "bhsd", "bshd ragged", "bshd ragged", "bshd ragged leftpad")) if page == 0 else "bshd ragged"
    words = [f"b{chance.randint(1, 4)} h{heads_kv * group} hk{heads_kv} q{queries}"]
    words += [f"k{chance.randint(queries, chance.choice((100, 700, 9000)))} d{dim} dv{build.choice((dim, dim, 8, 64, 128))}"]
    words += [build.choice(("fp16", "bf16")), build.choice(("", "causal")), kind if kind != "bhsd" else ""]
    words += [build.choice(("", "", "left40", "left700")), build.choice(("", "", "sinks")), f"page{page}" if page else ""]
    distribution = chance.choice(("normal", "normal", "large", "tiny", "opposed"))
    changed = Changed(number % 2**31, distribution, chance.random() < 0.6)
    place, variant, splits = build.randrange(100), build.choice(("", "", SLICED)), chance.choice((0, 0, 1, 7))
    return RandomCase(attention(" ".join(filter(None, words))), place, splits, variant, changed)


def test_random_problems_meet_what_it_serves() -> None:
    problems = [decoding(number).problem for number in range(400)]
    served = [problem.features for problem in problems if KERNEL.cannot(problem, H200) is None]
    assert len(served) > 390
    for mode in ("page", "leftpad", "sinks", "window"):
        assert {bool(getattr(features, mode)) for features in served} == {True, False}, mode
    assert {features.lengths for features in served} == {"equal", "ragged"}


@pytest.mark.gpu
def test_it_is_right_on_random_problems() -> None:
    first, gpu = random.randrange(2**31), current_gpu()
    print(f"first {first}")
    results: dict[int, list[str] | None] = {
        number: judged(KERNEL, decoding(number), gpu, torch.device("cuda")) for number in range(first, first + CASES)
    }
    wrong = [f"{number}: {decoding(number)}: {'; '.join(found)}" for number, found in results.items() if found]
    assert not wrong, "\n".join(wrong[:20])
    assert sum(found is not None for found in results.values()) > CASES * 3 // 4


def check_each(out: torch.Tensor, q: torch.Tensor, caches: Callable[[int], list[torch.Tensor]], lengths: list[int]) -> None:
    """Each sequence's output is attention to the first ``lengths`` rows of its ``caches``, [rows, heads_kv, width]."""
    for sequence, keys in enumerate(lengths):
        if keys == 0:
            assert (out[sequence] == 0).all()
            continue
        heads = [one[None, :keys].transpose(1, 2).float() for one in caches(sequence)]
        query = q[sequence : sequence + 1].transpose(1, 2).float()
        expected = torch.nn.functional.scaled_dot_product_attention(query, *heads, enable_gqa=True)
        assert (out[sequence].float() - expected[0].transpose(0, 1)).abs().max() < 2e-2, (lengths, sequence)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads_kv", "width"), [(8, 128), (1, 128), (8, 64)])
def test_a_graph_captured_at_some_lengths_serves_others_and_repeats_to_the_bit(heads_kv: int, width: int) -> None:
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 1, 8 * heads_kv, width, **make)  # type: ignore[call-overload]
    caches = [torch.randn(2, 3000, heads_kv, width, **make) for _ in range(2)]  # type: ignore[call-overload]
    lengths = torch.tensor([3000, 7], device="cuda", dtype=torch.int32)

    def attend() -> torch.Tensor:
        return fms.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, kernel=KERNEL.name)  # type: ignore[return-value]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for own in ([1, 2999], [64, 0], [2048, 129]):
        lengths.copy_(torch.tensor(own))
        graph.replay()
        first = out.clone()
        check_each(first, q, lambda sequence: [one[sequence] for one in caches], own)
        for _ in range(200):
            graph.replay()
            assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "capacity", "page"), [(8, 32768, 16), (40, 8192, 0), (5, 40000, 64), (130, 2048, 32)])
def test_unequal_sequences_are_right_in_order_and_in_ranges(batch: int, capacity: int, page: int) -> None:
    """Whether programs take splits in LPT order or use stream-K is decided on the device, anew for each replay."""
    make = {"device": "cuda", "dtype": torch.bfloat16}
    chance = Random(batch)
    q = torch.randn(batch, 1, 32, 128, **make)  # type: ignore[call-overload]
    shape = (batch * capacity // page, page, 8, 128) if page else (batch, capacity, 8, 128)
    caches = [torch.randn(*shape, **make) for _ in range(2)]  # type: ignore[call-overload]
    table = torch.randperm(shape[0], device="cuda", dtype=torch.int32).view(batch, -1) if page else None
    lengths = torch.full((batch,), capacity, device="cuda", dtype=torch.int32)

    def attend() -> torch.Tensor:
        return fms.flash_attn_with_kvcache(  # type: ignore[return-value]
            q, *caches, cache_seqlens=lengths, page_table=table, kernel=KERNEL.name
        )

    def rows_of(sequence: int) -> list[torch.Tensor]:
        if table is None:
            return [one[sequence] for one in caches]
        return [one[table[sequence].long()].flatten(0, 1) for one in caches]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    one_long = [capacity, *(chance.randint(0, 300) for _ in range(batch - 1))]
    mixed = [chance.randint(1, capacity) for _ in range(batch)]
    few = [0] * (batch - 2) + [129, capacity - 1]
    for own in ([capacity] * batch, one_long, mixed, few, [0] * batch):
        lengths.copy_(torch.tensor(own))
        graph.replay()
        first = out.clone()
        check_each(first, q, rows_of, own)
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, first)


@pytest.mark.gpu
def test_it_refuses_in_words_what_it_cannot_copy_and_another_kernel_serves_it() -> None:
    problem = attention("b1 h8 hk2 q1 k1000 d64 bf16")
    config = KERNEL.configs(problem, current_gpu())[0]
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(1, 2, 1000, 65, device="cuda", dtype=torch.bfloat16)[..., :64]
    with pytest.raises(CannotServe, match="a stride of 65; its copies need multiples of 8"):
        KERNEL.run(call_of(problem, q, wide, wide, 0.125), config)
    with pytest.raises(CannotServe, match=r"softmax_scale is -1\.0; this kernel needs it above 0"):
        KERNEL.run(call_of(problem, q, wide, wide, -1.0), config)
    out = fms.scaled_dot_product_attention(q, wide, wide, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), wide.double(), wide.double(), enable_gqa=True)
    assert (out.double() - expected).abs().max() < 2e-2
