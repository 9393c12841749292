"""moe_fp8_gluon_sm90 on a GPU: every case with every tile of tokens, and results that repeat."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.moe.cases import repeated
from tests.unit.ops.moe.products.fp8_cases import CASES, Case, between, inputs_of, wrong, wrong_between

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.moe.products.fp8_sm90.config import tile_of
from flashmoe_science.ops.moe.products.fp8_sm90.kernel import KERNEL

pytestmark = pytest.mark.gpu
LARGER = (
    Case("moe t1 e16 k8 d2048 f768 bf16 w:fp8_block_w8a8"),
    Case("moe t300 e16 k8 d2048 f768 bf16 w:fp8_block_w8a8"),
    Case("moe t3 e16 k8 d2048 f768 bf16 w:fp8_block_w8a8", "foreign"),
    Case("moe t700 e4 k2 d7168 f2048 bf16 w:fp8_block_w8a8"),
    Case("moe t300 e16 k8 d2048 f768 bf16 w:fp8_channel_w8a8"),
    Case("moe t1 e16 k8 d2048 f768 bf16 w:fp8_channel_static"),
    Case("moe t300 e16 k8 d2048 f768 bf16 w:fp8_channel_static", "one scale of all"),
)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_a_case_is_right_and_repeats(case: Case, tokens: int) -> None:
    inputs, gpu, config = inputs_of(case, "cuda"), current_gpu(torch.device("cuda")), tile_of(tokens)
    if reason := KERNEL.cannot(inputs.problem, gpu):
        pytest.skip(reason)
    assert wrong(inputs, repeated(KERNEL, inputs, config)) == []
    assert wrong_between(inputs, between(inputs, config)) == []
