"""Both products of moe_gemv_gluon build in every format, spill nothing, and read codes 16 bytes a thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import machine_code
import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

import torch

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.launch import collect_builds
from flashmoe_science.ops.moe.products.gemv_gluon.kernel import KERNEL
from flashmoe_science.ops.moe.proof.contract import CONTRACT

GPT_OSS, QWEN3 = "e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved", "e128 k8 d2048 f768"
CASES = (  # each format once
    ("h200", f"moe t4 {GPT_OSS}"),
    ("h200", f"moe t2 {QWEN3} bf16 w:fp8_block"),
    ("h200", f"moe t8 {QWEN3} bf16 w:fp8_block_w8a8"),
    ("h200", f"moe t1 {QWEN3} fp16 w:fp8_channel"),
    ("h200", f"moe t1 {QWEN3} bf16 w:fp8_channel_static"),
    ("h200", f"moe t1 {QWEN3} bf16 w:int4_g32_zero"),
    ("a100", f"moe t1 {QWEN3} bf16 w:int4_g128"),
)
MORE = (
    ("h200", f"moe t1 {GPT_OSS}"),
    ("h200", f"moe t1 {QWEN3} bf16 w:fp8_block"),
    ("h200", f"moe t1 {QWEN3} bf16 w:fp8_block_w8a8"),
    ("h200", f"moe t8 {QWEN3} bf16 w:fp8_channel_w8a8"),
    ("h200", f"moe t4 {QWEN3} bf16 w:int4_g128"),
    ("h200", "moe t1 e256 k8 d7168 f2048 bf16 w:fp8_block"),
    ("a100", f"moe t1 {GPT_OSS}"),
    ("a100", f"moe t1 {QWEN3} bf16 w:fp8_block"),
)
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)
pytestmark = pytest.mark.one_triton  # with the newest Triton test_kernels.py builds each kernel
SPILLS = 0 if machine_code.VERSION == "3.6" else 64  # bytes a thread, of 3.9's assembler


@pytest.mark.parametrize(("name", "text"), [*CASES, *(pytest.param(*one, marks=REDUNDANT) for one in MORE)])
def test_it_builds_and_fits(name: str, text: str, built: Callable[..., Build], compiled: Callable[..., Any]) -> None:
    gpu, problem = GPUS[name], parse_problem(text)
    config = KERNEL.configs(problem, gpu)[0]
    for job in compile_jobs(KERNEL, problem, config, gpu):
        build = built(job, gpu, KERNEL.name, problem, config)
        assert fits(build, gpu) is None
        assert build.spill_bytes <= SPILLS
        (promise,) = [one for one in KERNEL.launches(problem, config, gpu) if re.search(one.name, build.kernel)]
        assert build.threads == promise.threads
        ptx = compiled(job, gpu, KERNEL.name, problem, config).asm["ptx"]
        loads = re.findall(r"ld\.global\S*?\.(v\d\.b32|b\d+|v\d\.b\d+)", ptx)
        # Bytes are read by themselves only as scales of mxfp4, one to 16 bytes of codes.
        assert loads.count("v4.b32") > loads.count("b8")
        assert not {"v2.b32", "v2.b16", "v4.b16"} & set(loads)


def test_ids_of_64_bits_build() -> None:
    """PyTorch's top-k gives them."""
    gpu, problem = GPUS["h200"], parse_problem(f"moe t2 {QWEN3} bf16 w:int4_g128")
    made = dict(CONTRACT.inputs(problem, torch.device("meta"), torch.Generator()))
    with collect_builds(gpu) as jobs:
        given = CONTRACT.for_kernel(problem, {**made, "topk_ids": made["topk_ids"].long()})
        CONTRACT.planned(KERNEL, KERNEL.configs(problem, gpu)[0], given)
    assert len(jobs) == 2
    for job in jobs:
        run_compiler(job, gpu)
