"""The kernels behind a GPU's ceilings build for GPUs that are not here, and hold nothing but what they are named for."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import compile_for, fits
from flashmoe_science.kernel import CompileJob

PIPE = {"rounds": "i32", "BLOCK": "constexpr", "UNROLL": "constexpr"}
# Kernel: its arguments, its constexprs, and what its inner loop must be made of.
KERNELS: dict[str, tuple[dict[str, str], dict[str, int], str]] = {
    "flashmoe_read": (
        {"source": "*fp32", "sums": "*fp32", "tiles": "i32", "REPEATS": "constexpr", "BLOCK": "constexpr"},
        {"REPEATS": 32, "BLOCK": 4096},
        r"ld\.global\.cg\.v4",
    ),
    "flashmoe_multiply_add": ({"values": "*fp32", **PIPE}, {"BLOCK": 2048, "UNROLL": 16}, r"fma\.rn\.f32"),
    "flashmoe_exp2": ({"values": "*fp32", **PIPE}, {"BLOCK": 2048, "UNROLL": 16}, r"ex2\.approx"),
    "flashmoe_read_shared": (
        {"values": "*i32", "rounds": "i32", "BLOCK": "constexpr"},
        {"BLOCK": 256},
        r"ld\.volatile\.shared\.v4",
    ),
}


def job(name: str) -> CompileJob:
    module: Any = importlib.import_module("flashmoe_science.measure.profile.ceiling_kernels")
    signature, constexprs, _ = KERNELS[name]
    pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
    return CompileJob(getattr(module, name), signature, constexprs, pointers, num_warps=8, num_stages=1, threads=256)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("gpu", ["a100", "l4", "h200", "b200"])
def test_it_builds_and_fits(name: str, gpu: str) -> None:
    build = compile_for(job(name), GPUS[gpu])
    assert (build.refusal, fits(build, GPUS[gpu])) == (None, None)
    assert build.spill_bytes <= 8  # Triton 3.9's assembler stores one register of flashmoe_read_shared before its loop


@pytest.mark.parametrize("name", KERNELS)
def test_its_loop_does_what_it_is_named_for(name: str) -> None:
    ptx = run_compiler(job(name), GPUS["h200"]).asm["ptx"]
    assert len(re.findall(KERNELS[name][2], ptx)) >= 4
    assert len(re.findall(r"ld\.global(?!\.cg)", ptx)) <= 2  # the values, once


def test_an_empty_kernel_is_empty() -> None:
    module: Any = importlib.import_module("flashmoe_science.measure.profile.ceiling_kernels")
    empty = CompileJob(module.flashmoe_nothing, {"values": "*fp32"}, {}, ("values",), num_warps=4, num_stages=1, threads=128)
    assert not re.search(r"\b(ld|st)\.global", run_compiler(empty, GPUS["h200"]).asm["ptx"])
