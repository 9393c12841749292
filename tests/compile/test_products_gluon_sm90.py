"""Both products of moe_grouped_gluon_sm90 build for Hopper, and copy and multiply by the instructions meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.products.gluon_sm90 import kernel as grouped

GPU = GPUS["h200"]
QWEN, MIXTRAL, UNEVEN = (
    "moe t4096 e128 k8 d2048 f768 bf16",
    "moe t4096 e8 k2 d4096 f14336 fp16",
    "moe t700 e16 k3 d520 f200 bf16",
)
# All that UNEVEN has, in sizes that tiles divide.
DIVIDED = pytest.param(QWEN, marks=pytest.mark.one_triton)
# QWEN's build but for numbers, and for fp16, which test_kernels.py builds.
REDUNDANT = pytest.param(MIXTRAL, marks=[pytest.mark.slow, pytest.mark.redundant])
PRODUCTS = ("up", "down")


def first_of(product: str, text: str) -> tuple[Any, ...]:
    """What builds a product with the first config."""
    problem = parse_problem(text)
    config = grouped.configs(problem, GPU)[0]
    return compile_jobs(grouped.KERNEL, problem, config, GPU)[PRODUCTS.index(product)], GPU, grouped.NAME, problem, config


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("text", [DIVIDED, REDUNDANT, UNEVEN])
def test_builds_without_spills_and_fits(product: str, text: str, built: Callable[..., Build]) -> None:
    job, *names = first_of(product, text)
    build = built(job, *names)
    assert (build.refusal, build.registers, build.spill_bytes) == (None, 168, 0)
    assert build.threads == 384
    assert fits(build, GPU) is None
    assert build.kernel == f"flashmoe_moe_{product}_gluon_sm90"


@pytest.mark.parametrize("text", [DIVIDED, UNEVEN])
def test_rows_are_gathered_by_16_bytes_and_a_gate_stays_with_its_up(text: str, compiled: Callable[..., Any]) -> None:
    asm = compiled(*first_of("up", text)).asm
    # A thread's of a stage, in the loop before a program takes its next tile and in the one after.
    assert asm["ptx"].count("cp.async.cg.shared.global") == 2 * 8
    assert asm["ptx"].count("cp.async.bulk.tensor.5d") == 2
    assert "ttg.convert_layout" not in asm["ttgir"]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("text", [DIVIDED, UNEVEN])
def test_multiplies_64_rows_in_a_loop_that_is_not_unrolled(product: str, text: str, compiled: Callable[..., Any]) -> None:
    ptx = compiled(*first_of(product, text)).asm["ptx"]
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 2 * 4  # of two consumers, 64 deep
    assert ptx.count("cp.async.bulk.tensor.4d.global.shared") == 2 * (2 if product == "up" else 4)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_producer_takes_tiles_by_a_counter_and_tells_each_consumer_of_them(
    product: str, compiled: Callable[..., Any]
) -> None:
    ptx = compiled(*first_of(product, QWEN)).asm["ptx"]
    assert ptx.count("atom.global.gpu.relaxed.add") == ptx.count("atom.") == 1
    # All threads of a consumer have read the board before its first one gives it back.
    waits = [part.split("mbarrier.arrive")[0] for part in ptx.split("mbarrier.try_wait")[1:]]
    reads = [part.rpartition("ld.shared")[2] for part in waits if "ld.shared" in part and "wgmma" not in part]
    assert len(reads) >= 2 * 2  # of two consumers, before the loop and in it
    assert all("bar.sync" in after for after in reads)
