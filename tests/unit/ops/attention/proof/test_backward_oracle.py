"""What the bounds of the backward are made of."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.contract import unit_roundoff
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.proof.backward.contract import CONTRACT
from flashmoe_science.ops.attention.proof.backward.oracle import masses_of


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_next_to_nothing_is_lost_of_usual_values(dtype: str) -> None:
    """What is lost is for P near 2^-126 and O below the normal numbers alone: it loosens no bound elsewhere."""
    problem = parse_problem(f"attnbwd b1 h2 q96 k130 d64 {dtype} sinks")
    made = CONTRACT.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(3))
    mass, lost = masses_of(CONTRACT.for_kernel(problem, made))
    most = 1e-5 * unit_roundoff(made["q"].dtype)
    assert all(0.0 < less <= most * whole for less, whole in zip(lost[:5], mass[:5], strict=True))
