"""Times that cannot be are refused, with the reason."""

from __future__ import annotations

import pytest
from flashmoe_science.measure.sanity import floor_ns, impossible

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure.inputs import input_bytes
from flashmoe_science.operations import parse_problem

H200 = gpu_named("h200")


def test_the_floor_is_arithmetic_where_that_is_more_and_traffic_where_the_cache_is_cold() -> None:
    large, small = parse_problem("attn b1 h16 q16384 d128 bf16"), parse_problem("attn b32 h32 q1 k4096 d128 bf16")
    assert floor_ns(large, H200, "cold") == pytest.approx(1e9 * large.flops() / H200.tensor_flops_16bit)
    assert floor_ns(small, H200, "cold") == pytest.approx(1e9 * input_bytes(small) / H200.memory_bandwidth)
    assert floor_ns(small, H200, "warm") == pytest.approx(1e9 * small.flops() / H200.tensor_flops_16bit)
    assert floor_ns(large, None, "warm") == 0


@pytest.mark.parametrize(
    ("samples", "floor", "expected", "words"),
    [
        ([100, 0, 100], 0.0, None, "took no time"),
        ([100, 100, 100], 150.0, None, "below the 150 ns"),
        ([100, 100, 100], 0.0, 201.0, "where the quick bench found 201 ns"),
        ([100, 100, 100], 0.0, 49.0, "where the quick bench found 49 ns"),
    ],
)
def test_impossible_samples_are_refused(samples: list[int], floor: float, expected: float | None, words: str) -> None:
    reason = impossible(samples, floor, expected)
    assert reason is not None
    assert words in reason


def test_possible_samples_are_not() -> None:
    assert impossible([100, 90, 300], 99.0, 60.0) is None
