"""moe_mxfp4_gluon_sm90 on a GPU: every case with every tile of tokens, and results that repeat."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.moe.cases import repeated
from tests.unit.ops.moe.products.mxfp4_cases import CASES, Case, inputs_of, wrong

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.moe.products.mxfp4_sm90.config import tile_of
from flashmoe_science.ops.moe.products.mxfp4_sm90.kernel import KERNEL

pytestmark = pytest.mark.gpu
LARGER = (
    Case("moe t1 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"),
    Case("moe t256 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"),
    Case("moe t3 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved", "foreign"),
    Case("moe t700 e4 k2 d288 f224 bf16 w:mxfp4"),
)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_a_case_is_right_and_repeats(case: Case, tokens: int) -> None:
    inputs, gpu, config = inputs_of(case, "cuda"), current_gpu(torch.device("cuda")), tile_of(tokens)
    if reason := KERNEL.cannot(inputs.problem, gpu):
        pytest.skip(reason)
    assert wrong(inputs, repeated(KERNEL, inputs, config)) == []
