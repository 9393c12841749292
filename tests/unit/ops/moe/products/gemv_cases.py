"""Puts cases to the Gluon kernels of a few tokens and weights in a format on the CPU. Prints one JSON object: by case what is
wrong.

Run as a script with TRITON_INTERPRET=1; with the argument ``half`` every second case.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from tests.unit import gluon_interpreter
from tests.unit.ops.moe.cases import FORMAT_CASES, Case, inputs_of
from tests.unit.ops.moe.products import fp8_cases, weights_cases
from tests.unit.ops.moe.products.format_cases import named, of_every_format

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.products.gemv_gluon import launch
from flashmoe_science.ops.moe.products.gemv_gluon.kernel import KERNEL
from flashmoe_science.ops.moe.proof.oracle import moe_oracle

H200 = gpu_named("h200")
RMS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # weights of int4 in groups of 32 are rounded too
MORE = (
    Case("moe t3 e5 k2 d288 f160 bf16 w:mxfp4 bias clamped interleaved", routing="twice"),
    Case("moe t8 e6 k3 d1056 f192 bf16 w:mxfp4 bias", routing="foreign"),
    Case("moe t2 e6 k3 d96 f64 bf16 w:mxfp4", routing="foreign64"),
    Case("moe t6 e4 k2 d264 f300 bf16 w:fp8_block", routing="crowded"),
    Case("moe t7 e12 k5 d130 f150 bf16 w:fp8_channel gelu"),
    Case("moe t4 e40 k10 d256 f128 fp16 w:int4_g128_zero bias"),
    Case("moe t5 e3 k1 d160 f96 bf16 w:int4_g32_zero"),
)
CHANGES = (
    "foreign",
    "slices of larger tensors",
    "blocks 2^20 apart",
    "scales of e8m0",
    "NaN in one token",
    "zeros in one token",
)
STATIC = "", "a scale of gates and one of ups", "one scale of all", "NaN in one token"
W8A8 = (
    fp8_cases.Case("moe t1 e4 k2 d384 f256 bf16 w:fp8_block_w8a8"),
    fp8_cases.Case("moe t8 e3 k2 d400 f272 bf16 w:fp8_block_w8a8 clamped"),
    *(fp8_cases.Case("moe t7 e6 k3 d256 f128 bf16 w:fp8_block_w8a8", change) for change in CHANGES),
    fp8_cases.Case("moe t8 e3 k2 d400 f272 bf16 w:fp8_channel_w8a8 clamped"),
    fp8_cases.Case("moe t7 e6 k3 d256 f128 bf16 w:fp8_channel_w8a8", "a scale of gates and one of ups"),
    *(fp8_cases.Case("moe t7 e6 k3 d400 f144 bf16 w:fp8_channel_static", change) for change in (*STATIC, "foreign")),
)


def wrong(inputs: MoEInputs, out: torch.Tensor) -> str | None:
    """What is wrong with a result of weights alone, in words."""
    right, got = moe_oracle(inputs.tensors, inputs.activation), out.double()
    finite = right.isfinite() & (right.abs() < torch.finfo(out.dtype).max)
    if not torch.equal(got.isnan(), right.isnan()):
        return "NaN elsewhere than in the reference"
    if not got[finite].isfinite().all():
        return "it is not finite where the reference is"
    error = ((got - right)[finite].square().mean().sqrt() / right[finite].square().mean().sqrt().clamp(min=1e-30)).item()
    return f"its error is {error:.1e} of the RMS" if finite.any() and error > RMS[out.dtype] else None


def every() -> Iterator[tuple[str, MoEInputs]]:
    """Inputs by name: layers, and the numbers that formats must not get wrong."""
    for case in (*FORMAT_CASES, *MORE):
        case = replace(case, problem=re.sub(r"t(9|40) ", "t8 ", case.problem))
        yield str(case), inputs_of(case, "cpu")
    for name, inputs in chain(named(), of_every_format()):
        if name != "greater scales":  # with which rows between the products are infinite
            yield name, inputs
    for change in ("scales of 0", "scales of 252", "scales of 255"):
        case = weights_cases.Case("moe t7 e4 k2 d160 f96 bf16 w:mxfp4 interleaved", change)
        yield str(case), weights_cases.inputs_of(case)
    for case in W8A8:
        yield str(case), fp8_cases.inputs_of(case)


def faults(inputs: MoEInputs, out: torch.Tensor) -> list[str]:
    """What is wrong with a result, in words."""
    if FORMATS[str(inputs.problem.weight_format)].w8a8:
        return fp8_cases.wrong(inputs, out)
    found = wrong(inputs, out)
    return [found] if found else []


def main() -> None:
    launch.Build = gluon_interpreter.Build  # type: ignore[misc,assignment]
    launch.address = gluon_interpreter.address_of
    launch.argument = lambda one: None if one is None else gluon_interpreter.address_of(one)
    found: dict[str, Any] = {}
    for number, (name, inputs) in enumerate(every()):
        if (sys.argv[1:] == ["half"] and number % 2) or KERNEL.cannot(inputs.problem, H200):
            continue
        configs = KERNEL.configs(inputs.problem, H200)
        try:
            found[name] = faults(inputs, KERNEL.run(inputs, configs[number // 2 % len(configs)]))
        except CannotServe as refusal:
            found[name] = [] if "scales of groups" in str(refusal) else [str(refusal)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
