"""The physical floor: what a chip cannot do, and what it can although its datasheet says less."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flashmoe_science.hardware.floor import floor_ns
from flashmoe_science.hardware.gpus import GPUS, Gpu, gpu_named
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Arithmetic, CustomProblem

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


@dataclass(frozen=True, slots=True)
class Quantised(CustomProblem):
    """A product whose operands are e4m3."""

    def arithmetic(self) -> Arithmetic:
        return "8-bit"


def product(kind: type[CustomProblem] = CustomProblem) -> CustomProblem:
    n = 8192
    return kind("product", (("n", n),), "bf16", 2 * n**3, 3 * n * n)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(
    ("problem", "rates"),
    [
        ("attn b4 h16 q8192 d128 bf16", {"16-bit": 1.0}),
        # TF32, three products of fp16 parts, six of bf16 parts, and no tensor cores at all.
        ("attn b4 h16 q8192 d128 fp32", {"16-bit": 1 / 2}),
        ("attn b4 h16 q8192 d128 fp32", {"16-bit": 1 / 3, "fp32": 1.0}),
        ("attn b4 h16 q8192 d128 fp32", {"16-bit": 1 / 6}),
        ("moe t16384 e8 k2 d4096 f14336 fp32", {"fp32": 1.0}),
        (str(product()), {"8-bit": 1.0}),
        (str(product()), {"4-bit": 1.0}),
    ],
)
def test_no_honest_method_is_refused_at_its_datasheets_rate(gpu: Gpu, problem: str, rates: dict[str, float]) -> None:
    of = {
        "fp32": gpu.fp32_flops, "16-bit": gpu.tensor_flops_16bit, "8-bit": gpu.tensor_flops_8bit, "4-bit": gpu.tensor_flops_4bit
    }  # fmt: skip
    asked = parse_problem(problem)
    least = asked.flops() / sum(of[name] * share for name, share in rates.items()) * 1e9
    assert floor_ns(asked, gpu, "warm") < least / 1.05


def test_fp16_sums_of_a_geforce_card_are_no_miracle() -> None:
    """A kernel for fp16 may accumulate in fp16, at twice the rate that the table has for fp32 sums."""
    card, asked = gpu_named("rtx4090"), parse_problem("attn b4 h16 q8192 d64 fp16")
    assert floor_ns(asked, card, "warm") < asked.flops() / 330.3e12 * 1e9


def test_each_arithmetic_has_a_floor_of_its_own() -> None:
    bf16 = floor_ns(COMPUTE, H200, "warm")
    fp32 = floor_ns(parse_problem(str(COMPUTE).replace("bf16", "fp32")), H200, "warm")
    assert fp32 / bf16 == pytest.approx(1979 / 2 / (1979 / 4 + 67), rel=1e-3), "fp32 at the rate of bf16 is no measurement"
    work = product().flops()
    assert floor_ns(product(Quantised), H200, "warm") == pytest.approx(work / (1.1 * 1979e12) * 1e9)
    assert floor_ns(product(Quantised), gpu_named("b200"), "warm") == pytest.approx(work / (1.1 * 4.5e15) * 1e9)
    assert floor_ns(product(), gpu_named("b200"), "warm") == pytest.approx(work / (1.1 * 9e15) * 1e9)
