"""Both products of moe_grouped_gluon_sm90 build for Hopper, and copy and multiply by the instructions meant."""

from __future__ import annotations

import pytest
import triton

from flashmoe_science.hardware.compiler import run_compiler
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import compile_for, fits
from flashmoe_science.kernel import CompileJob
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe import grouped_gluon_sm90 as grouped

GPU = GPUS["h200"]
NEWER = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)  # than the Triton that the kernels are measured with
QWEN, MIXTRAL, UNEVEN = (
    "moe t4096 e128 k8 d2048 f768 bf16",
    "moe t4096 e8 k2 d4096 f14336 fp16",
    "moe t700 e16 k3 d520 f200 bf16",
)
# All that UNEVEN has, in sizes that tiles divide.
DIVIDED = pytest.param(QWEN, marks=pytest.mark.one_triton)
# QWEN's build but for numbers, and for fp16, which test_kernels.py builds.
AGAIN = pytest.param(MIXTRAL, marks=[pytest.mark.slow, pytest.mark.again])
ROWS = (128, 192)
JOBS = {"up": grouped.compile_job, "down": grouped.compile_job_down}


def job_of(product: str, text: str, rows: int) -> CompileJob:
    """Of a product in tiles of so many rows, whichever are the first choice for the problem."""
    configs = {config["block_m"]: config for config in grouped.configs(parse_problem(QWEN), GPU)}
    return JOBS[product](parse_problem(text), configs[rows], GPU)


@pytest.mark.parametrize("product", JOBS)
@pytest.mark.parametrize(("rows", "threads", "registers"), [(128, 384, 168), (192, 512, 128)])
@pytest.mark.parametrize("text", [DIVIDED, AGAIN, UNEVEN])
def test_builds_without_spills_and_fits(product: str, rows: int, threads: int, registers: int, text: str) -> None:
    job = job_of(product, text, rows)
    build = compile_for(job, GPU)
    # Of some depths the producer with 32 registers keeps two numbers in memory, which it reads once a tile; the assembler of
    # Triton 3.9 keeps up to eight of any depth.
    most = 0 if (product, rows) != ("up", 192) else 32 if NEWER else 8 if text == UNEVEN else 0
    assert (build.refusal, build.registers) == (None, registers)
    assert build.spill_bytes <= most
    assert build.threads == job.threads == threads
    assert fits(build, GPU) is None
    assert build.kernel == f"flashmoe_moe_{product}_gluon_sm90"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("text", [DIVIDED, UNEVEN])
def test_rows_are_gathered_by_16_bytes_and_a_gate_stays_with_its_up(rows: int, text: str) -> None:
    asm = run_compiler(job_of("up", text, rows), GPU).asm
    assert asm["ptx"].count("cp.async.cg.shared.global") == rows // 16  # a thread's of a stage
    assert asm["ptx"].count("cp.async.bulk.tensor.5d") == 1
    assert "ttg.convert_layout" not in asm["ttgir"]


@pytest.mark.parametrize("product", JOBS)
@pytest.mark.parametrize(("rows", "instruction", "number"), [(128, "m64n256k16", 2), (192, "m64n128k16", 3 * 2)])
@pytest.mark.parametrize("text", [DIVIDED, UNEVEN])
def test_multiplies_64_rows_in_a_loop_that_is_not_unrolled(
    product: str, rows: int, instruction: str, number: int, text: str
) -> None:
    ptx = run_compiler(job_of(product, text, rows), GPU).asm["ptx"]
    assert ptx.count("wgmma.mma_async.sync.aligned.m64") == number * 4  # 64 deep
    assert ptx.count(f"wgmma.mma_async.sync.aligned.{instruction}") == number * 4
    assert ptx.count("cp.async.bulk.tensor.4d.global.shared") == rows // 64 * (2 if product == "up" else 4)
