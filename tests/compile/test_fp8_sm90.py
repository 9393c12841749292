"""Both products of moe_fp8_gluon_sm90 build for Hopper, and spill nothing where they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.products.fp8_sm90 import kernel as fp8
from flashmoe_science.ops.moe.products.fp8_sm90.config import AT_LAUNCH, THREADS, tile_of

GPU = GPUS["h200"]
QWEN3, UNEVEN = "moe t16 e128 k8 d2048 f768 bf16 w:fp8_block_w8a8", "moe t700 e16 k3 d400 f272 bf16 w:fp8_block clamped"
CHANNELS, STATIC = (QWEN3.replace("fp8_block_w8a8", f"fp8_channel_{one}") for one in ("w8a8", "static"))
PRODUCTS = ("up", "down")
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)
pytestmark = pytest.mark.one_triton  # with the newest Triton test_kernels.py builds each kernel


def built_of(product: str, text: str, tokens: int) -> tuple[Any, ...]:
    """What builds a product for tiles of so many tokens."""
    problem, config = parse_problem(text), tile_of(tokens)
    return compile_jobs(fp8.KERNEL, problem, config, GPU)[PRODUCTS.index(product)], GPU, fp8.NAME, problem, config


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *((QWEN3, 32), (UNEVEN, 16), (CHANNELS, 64), (STATIC, 8)),
        *(pytest.param(*one, marks=REDUNDANT) for one in ((QWEN3, 8), (QWEN3, 64), (STATIC, 64))),
    ],
)
def test_builds_and_fits(product: str, text: str, tokens: int, built: Callable[..., Build]) -> None:
    job, *names = built_of(product, text, tokens)
    build = built(job, *names)
    assert (build.refusal, build.registers, build.spill_bytes, build.threads) == (None, AT_LAUNCH, 0, THREADS)
    assert fits(build, GPU) is None


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("text", [QWEN3, pytest.param(CHANNELS, marks=REDUNDANT), STATIC])
def test_tiles_of_many_tokens_spill_nothing_in_a_loop(product: str, text: str, built: Callable[..., Build]) -> None:
    job, *names = built_of(product, text, 128)
    build = built(job, *names)
    assert (build.refusal, build.threads, fits(build, GPU)) == (None, THREADS, None)
    assert build.spill_bytes <= 16  # of a tile, which has 16 steps or more


@pytest.mark.parametrize(("tokens", "widths"), [(32, [32]), (128, [64, 128])])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_step_is_one_sum_of_four_instructions(
    product: str, tokens: int, widths: list[int], compiled: Callable[..., Any]
) -> None:
    ptx = compiled(*built_of(product, QWEN3, tokens)).asm["ptx"]
    both = 2 * 2 * 4  # of two consumers, two halves of rows: K of 32 each
    assert all(ptx.count(f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3") == both for width in widths)
    assert ptx.count("wgmma.mma_async") == both * len(widths)
