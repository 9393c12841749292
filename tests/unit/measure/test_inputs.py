"""Inputs of a case are the same in every process; what is a plain tensor; how many sets are cold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.contract import built_in
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.compare import Comparer, input_sets
from flashmoe_science.measure.inputs import MAX_SETS, Case, disturb, kind_of, make, same_bits, sets_beyond
from flashmoe_science.operations import parse_problem

CPU = torch.device("cpu")
H200 = gpu_named("h200")


@pytest.mark.parametrize("text", ["attn b1 h4 hk2 q9 k7 d16 bf16 bshd", "moe t5 e4 k2 d16 f8 fp16"])
def test_a_case_gives_the_same_bits_every_time(text: str) -> None:
    problem = parse_problem(text)
    held = built_in(problem.op)
    case = Case(11, "large", 0.75)
    one, two = (make(held, problem, CPU, case) for _ in range(2))
    assert all(same_bits(one[name], two[name]) for name in one)
    other = make(held, problem, CPU, Case(12, "large", 0.75))
    assert not any(same_bits(one[name], other[name]) for name in one)


def test_one_element_that_is_nudged_is_all_that_differs() -> None:
    problem = parse_problem("attn b1 h2 q9 d8 fp16")
    held = built_in(problem.op)
    one, nudged = (make(held, problem, CPU, Case(11, nudged=nudged)) for nudged in (False, True))
    assert int((one["q"] != nudged["q"]).sum()) == 1
    assert same_bits(one["k"], nudged["k"])
    assert same_bits(one["v"], nudged["v"])


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2.0**-17), (torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_half_of_the_elements_are_disturbed_and_in_16_bits_equal_ones_alike(dtype: torch.dtype, step: float) -> None:
    normal = torch.randn(4000, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = {"x": normal, "same": torch.full((40,), 0.625, dtype=dtype), "zero": torch.zeros(40, dtype=dtype)}
    whole = {"ids": torch.arange(40), "e4m3": torch.ones(40, dtype=torch.float8_e4m3fn)}
    seen = []
    for seed in range(1, 9):
        after = {name: tensor.clone() for name, tensor in (before | whole).items()}
        disturb(after, seed)
        assert all(same_bits(after[name], tensor) for name, tensor in (whole | {"zero": before["zero"]}).items())
        assert (len(after["same"].unique()) == 1) is (dtype != torch.float32)
        moved = (normal != after["x"]).double()
        by = 1 - after["x"].double() / normal.double()
        assert 0 <= by.min() < by.max() <= 2 * step
        assert 0.45 < moved.mean() < 0.55
        seen.append(moved)
    assert torch.corrcoef(torch.stack(seen)).triu(1).abs().max() < 0.2


@pytest.mark.parametrize(
    ("input_bytes", "sets", "cache"),
    [
        (3 * 64 * 64 * 2, sets_beyond(H200.l2_bytes, 3 * 64 * 64 * 2), "cold"),  # the smallest tile of the documents
        (3 * 4 * 4 * 2, 2, "warm"),  # more sets than a graph may hold
        (2**30, 2, "cold"),  # larger than the cache: two, so that no call repeats the one before it
    ],
)
def test_sets_are_cold_where_they_are_together_more_than_twice_the_cache(input_bytes: int, sets: int, cache: str) -> None:
    assert input_sets(H200, input_bytes, input_bytes) == (sets, cache)
    assert (sets * input_bytes > 2 * H200.l2_bytes) == (cache == "cold")
    assert sets <= MAX_SETS


@pytest.mark.parametrize(("input_bytes", "expected"), [(2**29, (16, "cold")), (2**31, (2, "warm"))])
def test_what_a_window_hides_keeps_no_cache_cold(input_bytes: int, expected: tuple[int, str]) -> None:
    assert input_sets(H200, input_bytes, 2**23) == expected


def freed() -> torch.Tensor:
    made = torch.ones(8)
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (torch.ones(2, 3), "Tensor"),
        (torch.ones(2, 3).t()[1:], "Tensor"),
        (torch.ones(1).expand(5), "Tensor"),
        (torch.empty(0, 3), "Tensor"),
        (None, "NoneType"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter"),
        (torch.ones(2, 3).to_sparse(), "tensor of layout sparse_coo"),
        (torch.ones(2, 3).to_mkldnn(), "tensor of layout _mkldnn"),
        (torch.ones(2, device="meta"), "tensor without memory (on the device meta)"),
        (torch._neg_view(torch.ones(2)), "tensor that is negated or conjugated only when it is read"),
        (torch.ones(2, dtype=torch.complex64).conj(), "tensor that is negated or conjugated only when it is read"),
        (freed(), "tensor whose memory was freed"),
    ],
)
def test_what_is_no_plain_tensor_is_told_by_its_kind(made: object, kind: str) -> None:
    assert kind_of(made) == kind


def test_sets_of_experts_are_cold_by_what_a_call_reads() -> None:
    problem = parse_problem("moe t1 e128 k8 d2048 f768 bf16 w:int4_g128 logits")
    on = SimpleNamespace(
        problem=problem,
        input_bytes=128 * 8 * 2**20,
        session=SimpleNamespace(bench=SimpleNamespace(gpu=H200), request=SimpleNamespace(quick=True, seed=0)),
        worker=SimpleNamespace(folder=Path("unused")),
    )
    assert Comparer(on).sets * problem.min_bytes() > 2 * H200.l2_bytes  # type: ignore[arg-type]
