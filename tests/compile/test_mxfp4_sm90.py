"""Both products of moe_mxfp4_gluon_sm90 build for Hopper without spills, and bytes become weights where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.products.mxfp4_sm90 import kernel as mxfp4
from flashmoe_science.ops.moe.products.mxfp4_sm90.config import registers_of, tile_of

GPU = GPUS["h200"]
GPT_OSS, UNEVEN = (
    "moe t16 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved",
    "moe t700 e16 k3 d288 f224 bf16 w:mxfp4",
)
PRODUCTS = ("up", "down")


def built_of(product: str, text: str, tokens: int) -> tuple[Any, ...]:
    """What builds a product for tiles of so many tokens."""
    problem, config = parse_problem(text), tile_of(tokens)
    return compile_jobs(mxfp4.KERNEL, problem, config, GPU)[PRODUCTS.index(product)], GPU, mxfp4.NAME, problem, config


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("text", "tokens"), [(GPT_OSS, 8), (GPT_OSS, 64), (UNEVEN, 128)])
def test_builds_and_fits(product: str, text: str, tokens: int, built: Callable[..., Build]) -> None:
    job, *names = built_of(product, text, tokens)
    build = built(job, *names)
    registers = registers_of(tile_of(tokens))
    assert (build.refusal, build.registers, build.spill_bytes) == (None, registers.at_launch, 0)
    assert build.threads == registers.threads
    assert fits(build, GPU) is None


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("product", PRODUCTS)
def test_bytes_become_the_operand_without_moving_between_threads(
    product: str, tokens: int, compiled: Callable[..., Any]
) -> None:
    ptx = compiled(*built_of(product, GPT_OSS, tokens)).asm["ptx"]
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n") == 2 * 256 // 64 * 8  # of all consumers, two steps
    loop = ptx.split("wgmma.fence")[1]
    assert "shfl" not in loop
    of_a_row = 256 // 64 * 2 * 2  # of all consumers' threads, two steps
    assert ptx.count("ld.shared.v4.b32") >= of_a_row
    assert ptx.count("mul.rn.bf16x2") == of_a_row * 2 * 16  # by a factor, and by what it lacks, two weights each
