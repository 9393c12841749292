"""Guards around memory: what a call is given, and what it allocates."""

from __future__ import annotations

import ctypes
import importlib
import sys

import pytest
import torch

from flashmoe_science.measure.guards import Guarded, allocations
from flashmoe_science.measure.inputs import same_bits


def test_a_guarded_tensor_keeps_values_and_strides_amid_nan() -> None:
    tensor = torch.randn(2, 5, 3).transpose(0, 1)
    guarded = Guarded(tensor)
    assert same_bits(guarded.placed, tensor)
    assert guarded.placed.stride() == tensor.stride()
    assert type(guarded.placed) is torch.Tensor
    around = torch.empty(0).set_(guarded.placed.untyped_storage(), guarded.placed.storage_offset() - 1, (32,))
    assert around[0].isnan()
    assert around[31].isnan()
    assert not guarded.touched()
    guarded.placed.zero_()
    assert not guarded.touched()


@pytest.mark.parametrize("past", [-1, 30])
def test_a_write_beside_a_guarded_tensor_is_seen(past: int) -> None:
    guarded = Guarded(torch.randn(30))
    ctypes.memset(guarded.placed.data_ptr() + 4 * past, 0, 4)
    assert guarded.touched()


@pytest.mark.parametrize("compiler", [False, True])
def test_guarded_allocations_are_poisoned_and_their_ends_watched(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler:
        importlib.import_module("torch._dynamo")
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    like = torch.ones(4, 6)
    with allocations(True) as guards:
        made = [
            torch.empty(3, 7, dtype=torch.bfloat16),
            torch.empty_like(like),
            like.new_empty(5),
            torch.empty_strided((2, 3), (1, 2)),
        ]
        right = torch.softmax(like, -1)
    assert guards is not None
    assert all(one.isnan().all() for one in made)
    assert torch.equal(right, torch.softmax(like, -1))
    assert not guards.overrun()
    ctypes.memset(made[0].data_ptr() + 2 * made[0].numel(), 0, 1)
    assert guards.overrun()
