"""moe_mxfp4_gluon_sm90 and moe_weights_gluon_sm90 on a GPU: every case with tiles of tokens, and results that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product

import pytest
import torch
from tests.unit.ops.moe.cases import repeated
from tests.unit.ops.moe.products.weights_cases import CASES, Case, inputs_of, kernel_of, wrong

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.moe.products.weights_sm90.config import tile_of

pytestmark = pytest.mark.gpu
GPT_OSS = "e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"
LARGER = (
    Case(f"moe t1 {GPT_OSS}"),
    Case(f"moe t256 {GPT_OSS}"),
    Case(f"moe t3 {GPT_OSS}", "foreign"),
    Case("moe t700 e4 k2 d288 f224 bf16 w:mxfp4"),
)
TILES = (8, 16, 32, 64, 128)  # tokens
OF_SIZE = ((3, 8), (3, 16), (200, 32), (200, 64), (1500, 128))  # of a layer, of a tile


def _put() -> Iterator[tuple[Case, int]]:
    """Cases of mxfp4 with each tile, of other formats with one: each is a build of its own."""
    others = [case for case in CASES if "mxfp4" not in case.problem]
    yield from product((case for case in (*CASES, *LARGER) if case not in others), TILES)
    yield from zip(others, cycle(TILES), strict=False)
    for form, (layer, tile) in product(("fp8_block", "int4_g128"), OF_SIZE):
        yield Case(f"moe t{layer} e16 k4 d2048 f768 bf16 w:{form}"), tile


@pytest.mark.parametrize(("case", "tokens"), [*_put()], ids=str)
def test_a_case_is_right_and_repeats(case: Case, tokens: int) -> None:
    inputs, gpu = inputs_of(case, "cuda"), current_gpu(torch.device("cuda"))
    kernel, config = kernel_of(inputs), tile_of(tokens, form=str(inputs.problem.weight_format))
    if reason := kernel.cannot(inputs.problem, gpu):
        pytest.skip(reason)
    assert wrong(inputs, repeated(kernel, inputs, config)) == []
