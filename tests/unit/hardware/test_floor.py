"""The physical floor: what a chip cannot do, and what it can although its datasheet says less."""

from __future__ import annotations

import pytest

from flashmoe_science.hardware.floor import floor_ns
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import parse_problem

H200 = gpu_named("h200")
COMPUTE = parse_problem("attn b4 h16 q8192 d128 bf16")


def test_a_board_above_its_datasheet_clock_is_not_refused_but_a_fifth_more_is_impossible() -> None:
    peak = COMPUTE.flops() / H200.tensor_flops_16bit * 1e9  # ns
    assert peak / 1.20 < floor_ns(COMPUTE, H200, "cold") < peak / 1.05


def test_cold_inputs_must_cross_the_memory_bus_and_warm_ones_need_not() -> None:
    decode = parse_problem("attn b64 h32 q1 k4096 d128 fp16")
    read = decode.input_bytes()
    assert read is not None
    assert floor_ns(decode, H200, "cold") == pytest.approx(read / (1.1 * H200.memory_bandwidth) * 1e9)
    assert floor_ns(decode, H200, "warm") < floor_ns(decode, H200, "cold") / 50


def test_of_what_is_read_and_written_the_l2_may_hold_its_size() -> None:
    experts = parse_problem("moe t1 e8 k2 d4096 f14336 bf16")
    assert experts.input_bytes() is None
    read = experts.min_bytes() - H200.l2_bytes
    assert floor_ns(experts, H200, "cold") == pytest.approx(read / (1.1 * H200.memory_bandwidth) * 1e9)
    assert floor_ns(parse_problem("op add n16 fp16 flops16 bytes64"), H200, "cold") < 1
