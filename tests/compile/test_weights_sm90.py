"""Products of weights in a format build for Hopper without spills, and bytes become weights where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.products.weights_sm90 import kernel as weights
from flashmoe_science.ops.moe.products.weights_sm90.config import registers_of, tile_of

GPU = GPUS["h200"]
GPT_OSS, UNEVEN = (
    "moe t16 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved",
    "moe t700 e16 k3 d288 f224 bf16 w:mxfp4",
)
FP8, INT4, INT4_ZERO = (f"moe t4096 e128 k8 d2048 f768 bf16 w:{form}" for form in ("fp8_block", "int4_g128", "int4_g32_zero"))
PRODUCTS = ("up", "down")
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)
pytestmark = pytest.mark.one_triton  # with the newest Triton test_kernels.py builds each kernel


def built_of(product: str, text: str, tokens: int) -> tuple[Any, ...]:
    """What builds a product for tiles of so many tokens."""
    problem, config = parse_problem(text), tile_of(tokens, form=text.partition("w:")[2].split()[0])
    kernel = weights.KERNEL if "mxfp4" in text else weights.OF_OTHERS
    return compile_jobs(kernel, problem, config, GPU)[PRODUCTS.index(product)], GPU, kernel.name, problem, config


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *((GPT_OSS, 8), (GPT_OSS, 64), (UNEVEN, 128), (FP8, 8), (FP8, 64), (INT4_ZERO, 64)),
        *(pytest.param(*one, marks=REDUNDANT) for one in ((FP8, 128), (INT4, 64))),
    ],
)
def test_builds_and_fits(product: str, text: str, tokens: int, built: Callable[..., Build]) -> None:
    job, *names = built_of(product, text, tokens)
    build = built(job, *names)
    registers = registers_of(tile_of(tokens))
    assert (build.refusal, build.registers, build.spill_bytes) == (None, registers.at_launch, 0)
    assert build.threads == registers.threads
    assert fits(build, GPU) is None


@pytest.mark.parametrize(("tokens", "apart", "together"), [(8, 1, 0), (64, 0, 2)])
@pytest.mark.parametrize(
    ("text", "shuffled", "products"), [(GPT_OSS, 1, 2), (FP8, 0, 1), pytest.param(INT4, 0, 1, marks=REDUNDANT)]
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_bytes_become_the_operand_without_moving_between_threads(
    product: str, text: str, shuffled: int, products: int, tokens: int, apart: int, together: int, compiled: Callable[..., Any]
) -> None:
    """``apart`` and ``together``: steps of the loops of either kind; ``products``: of two bf16, of each two weights."""
    ptx = compiled(*built_of(product, text, tokens)).asm["ptx"]
    consumers, of_a_step = 4, 8  # matrix instructions deep
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n") == consumers * together * of_a_step
    assert ptx.count("mma.sync.aligned.m16n8k16") == consumers * apart * of_a_step
    rows = consumers * 2 * (apart + together)  # of all consumers' threads
    assert ptx.count("shfl") == 1 + rows * shuffled  # the number of a warp, and scales
    assert ptx.count("ld.shared.v4.b32") >= rows
    assert ptx.count("mul.rn.bf16x2") == rows * products * 16  # by a factor, and what it lacks; by what bf16 lacks of a scale
