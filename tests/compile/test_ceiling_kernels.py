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

ARGUMENTS = {"source": "*fp32", "sums": "*fp32", "tiles": "i32", "REPEATS": "constexpr", "BLOCK": "constexpr"}


def reads() -> CompileJob:
    module: Any = importlib.import_module("flashmoe_science.measure.profile.ceiling_kernels")
    constexprs, pointers = {"REPEATS": 32, "BLOCK": 4096}, ("source", "sums")
    return CompileJob(module.flashmoe_read, ARGUMENTS, constexprs, pointers, num_warps=8, num_stages=1, threads=256)


@pytest.mark.parametrize("gpu", ["a100", "l4", "h200", "b200"])
def test_it_builds_and_fits(gpu: str) -> None:
    build = compile_for(reads(), GPUS[gpu])
    assert (build.refusal, fits(build, GPUS[gpu]), build.spill_bytes) == (None, None, 0)


def test_its_loop_reads_past_the_l1_and_nothing_else() -> None:
    ptx = run_compiler(reads(), GPUS["h200"]).asm["ptx"]
    assert len(re.findall(r"ld\.global\.cg\.v4", ptx)) >= 4
    assert not re.search(r"ld\.global(?!\.cg)", ptx)


def test_an_empty_kernel_is_empty() -> None:
    module: Any = importlib.import_module("flashmoe_science.measure.profile.ceiling_kernels")
    empty = CompileJob(module.flashmoe_nothing, {"values": "*fp32"}, {}, ("values",), num_warps=4, num_stages=1, threads=128)
    assert not re.search(r"\b(ld|st)\.global", run_compiler(empty, GPUS["h200"]).asm["ptx"])
