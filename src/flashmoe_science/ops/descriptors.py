"""Descriptors of the copy engine for Gluon kernels, before there is a tensor: what a build is made for."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.ops.launch import Pointer

Tile = tuple[int, ...]  # elements of a copy in each dimension


def template(tile: Tile, dtype: str) -> TensorDescriptor:
    """A descriptor of a tile of "fp16" or "bf16", over no tensor in particular."""
    base = Pointer(torch.bfloat16 if dtype == "bf16" else torch.float16)
    return TensorDescriptor(base, list(tile), [8] * (len(tile) - 1) + [1], list(tile), _layout(tile, dtype))


def type_of(tile: Tile, dtype: str) -> str:
    """The type of such a descriptor in a kernel's signature."""
    return f"tensordesc<{dtype}{list(tile)},{_layout(tile, dtype)!r}>"


def _layout(tile: Tile, dtype: str) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16 if dtype == "bf16" else gl.float16)
