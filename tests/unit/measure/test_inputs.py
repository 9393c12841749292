"""Inputs are seeded, differ from set to set, lie as the problem says, and are called cold only where they are."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.inputs import MAX_SETS, input_bytes, make_inputs, sets_for_cold
from flashmoe_science.operations import parse_problem

CPU = torch.device("cpu")
L2 = gpu_named("h200").l2_bytes


def test_one_seed_gives_one_result_and_another_another() -> None:
    problem = parse_problem("attn b1 h2 q9 d8 fp16")
    first, again, other = (make_inputs(problem, CPU, seed, 0).first for seed in (42, 42, 43))
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.v, again.v)
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_shapes_strides_and_alignment(layout: str) -> None:
    problem = parse_problem(f"attn b2 h4 hk2 q9 k7 d5 dv3 bf16 {layout}")
    one = make_inputs(problem, CPU, 1, 0).first
    assert [tuple(tensor.shape) for tensor in (one.q, one.k, one.v)] == [(2, 4, 9, 5), (2, 2, 7, 5), (2, 2, 7, 3)]
    assert one.q.stride() == ((180, 45, 5, 1) if layout == "bhsd" else (180, 5, 20, 1))
    assert all((tensor.data_ptr() - one.q.data_ptr()) % 512 == 0 for tensor in (one.q, one.k, one.v))


def test_cold_sets_are_together_more_than_twice_the_cache_and_all_differ() -> None:
    problem = parse_problem("attn b1 h1 q16 d16 fp32")
    sets = make_inputs(problem, CPU, 1, l2_bytes=8 * input_bytes(problem))
    assert sets.cache == "cold"
    assert len(sets.sets) * input_bytes(problem) > 2 * 8 * input_bytes(problem)
    assert len({one.q.data_ptr() for one in sets.sets}) == len(sets.sets)
    assert not torch.equal(sets.sets[0].k, sets.sets[1].k)


def test_a_problem_too_small_to_be_cold_says_so() -> None:
    problem = parse_problem("attn b1 h1 q4 d4 fp16")
    assert sets_for_cold(problem, L2) > MAX_SETS
    sets = make_inputs(problem, CPU, 1, L2)
    assert (len(sets.sets), sets.cache) == (1, "warm")


def test_the_documents_smallest_tile_can_be_cold_on_an_h200() -> None:
    assert sets_for_cold(parse_problem("attn b1 h1 q64 d64 fp16"), L2) <= MAX_SETS


def test_a_problem_larger_than_the_cache_still_has_two_sets() -> None:
    assert sets_for_cold(parse_problem("attn b1 h16 q16384 d128 bf16"), L2) == 2
