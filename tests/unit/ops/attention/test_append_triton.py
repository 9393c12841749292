"""Appending to caches in Triton's interpreter: contiguous and in pages, both rotary styles, ragged, past the capacity."""

from __future__ import annotations

import pytest
import torch
from append_reference import Draw
from test_split_triton import interpreted, wrong


def test_appends_are_right() -> None:
    found = interpreted("0", "25", script="append_reference.py")
    assert len(found) == 25
    assert wrong(found) == {}


@pytest.mark.slow
def test_more_appends_are_right() -> None:
    assert wrong(interpreted("40", "300", script="append_reference.py")) == {}


def test_the_appends_cover_what_the_kernel_meets() -> None:
    drawn = [Draw(seed, torch.device("cpu")) for seed in range(40)]
    assert {one.page > 0 for one in drawn} == {one.places is None for one in drawn} == {True, False}
    assert {one.rotary.interleaved for one in drawn if one.rotary} == {True, False}
    assert {one.rotary.seqlens is None for one in drawn if one.rotary} == {True, False}
    assert {one.queries.moving for one in drawn if one.queries} == {True, False}
    assert {one.new.cu_seqlens_new is None for one in drawn} == {True, False}
    assert any(b + n > one.capacity for one in drawn for b, n in zip(one.before, one.news, strict=True))
