"""A thousand calls of each backward kernel give the same bits, in memory that was left full of NaN."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.contract import built_in
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.operations import kernel_named, parse_problem

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SPLIT = (
    "b2 h8 hk2 q1000 d128 bf16 causal",
    "b1 h16 hk1 q600 k900 d128 fp16",
    "b1 h4 q700 d256 fp16",
    "b2 h4 q500 d96 bf16 causal",
    "b1 h4 q700 d192 dv128 bf16 causal",
    "b3 h8 hk2 q600 d128 bf16 causal packed sinks",
    "b2 h8 hk2 q900 d128 bf16 causal left100",
    "b1 h6 hk2 q900 d256 bf16 causal",
    "b3 h4 q500 d192 bf16 packed",
)
FUSED = (
    "b2 h11 q2000 d64 bf16",
    "b1 h6 hk2 q1500 k1700 d64 fp16 causal",
    "b1 h1 q20000 d64 bf16 causal",  # more tiles of keys than run at once
    "b9 h16 hk2 q1500 d64 bf16 causal packed sinks",
    "b7 h11 q1300 d64 fp16 packed",
    "b2 h7 q3000 d64 bf16 causal left700",
    "b1 h1 q20000 d64 bf16 left5000 right300",
    "b2 h5 q2000 d128 bf16",
    "b1 h6 hk2 q1500 k1700 d128 fp16 causal",
    "b1 h1 q20000 d128 bf16 causal",
    "b9 h16 hk2 q1500 d128 bf16 causal packed sinks",
    "b2 h7 q3000 d96 bf16 causal left700",
    "b3 h4 q1500 d80 fp16 causal",
)
TILED = (*SPLIT, "b3 h4 q600 d64 bf16 packed", "b2 h8 hk2 q900 d64 bf16 causal left100 softcap5", "b1 h2 q300 d80 fp32 bias")
SHORT = ("b2 h4 hk2 q512 d64 bf16 causal", "b1 h4 q300 k333 d128 fp16", "b2 h2 q100 k70 d24 bf16 causal")
CASES = {"bwd_gluon_sm90": SPLIT, "bwd_fused_gluon_sm90": FUSED, "bwd_triton": TILED, "bwd_short_triton": SHORT}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in CASES.items() for text in texts])
def test_bits_are_equal_a_thousand_times(name: str, text: str) -> None:
    problem, kernel = parse_problem(f"attnbwd {text}"), kernel_named(name, "attention_backward")
    contract, gpu = built_in(problem.op), current_gpu(DEVICE)
    assert kernel.cannot(problem, gpu) is None
    inputs = contract.for_kernel(problem, contract.inputs(problem, DEVICE, torch.Generator(DEVICE).manual_seed(1)))
    call = contract.planned(kernel, kernel.configs(problem, gpu)[0], inputs)
    first = [one.clone() for one in contract.from_kernel(call(inputs))]
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(999):
        full = [torch.full((2**size,), torch.nan, device=DEVICE) for size in (12, 16, 20, 22)]
        del full
        for one, other in zip(contract.from_kernel(call(inputs)), first, strict=True):
            differ += (one != other).sum()
    assert differ.item() == 0
