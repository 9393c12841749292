"""Appending to caches in Triton's interpreter: contiguous and in pages, both rotary styles, ragged, past the capacity."""

from __future__ import annotations

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.attention.device.append_reference import Draw

SCRIPT = "ops/attention/device/append_reference.py"


def test_appends_are_right(interpreted: Interpreter) -> None:
    found = interpreted(SCRIPT, "0", "16")
    assert len(found) == 16
    assert {call: complaints for call, complaints in found.items() if complaints} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), [("16", "24"), pytest.param("40", "260", marks=pytest.mark.redundant)])
def test_more_appends_are_right(first: str, count: str, interpreted: Interpreter) -> None:
    found = interpreted(SCRIPT, first, count)
    assert {call: complaints for call, complaints in found.items() if complaints} == {}


def test_the_appends_cover_what_the_kernel_meets() -> None:
    drawn = [Draw(seed, torch.device("cpu")) for seed in range(40)]
    assert {one.page > 0 for one in drawn} == {one.places is None for one in drawn} == {True, False}
    assert {one.rotary.interleaved for one in drawn if one.rotary} == {True, False}
    assert {one.turns is None for one in drawn if one.rotary} == {True, False}
    assert {one.moving for one in drawn if one.rotary} == {True, False}
    assert {one.append.cu_seqlens_k_new is None for one in drawn} == {True, False}
    assert any(b + n > one.capacity for one in drawn for b, n in zip(one.before, one.news, strict=True))
