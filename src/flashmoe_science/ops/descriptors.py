"""Descriptors of the copy engine for Gluon kernels, before there is a tensor: what a build is made for."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.ops.launch import Pointer

Tile = tuple[int, ...]  # elements of a copy in each dimension
RAGGED_ROWS = gl.constexpr(2**30)  # see ``ragged``
MOST_ROWS = 0x7FFF0000  # before the end of rows that end where a copy says
_STRIDE = 2**34
_DTYPES = {
    "bf16": (torch.bfloat16, gl.bfloat16), "fp16": (torch.float16, gl.float16), "fp32": (torch.float32, gl.float32),
    "uint8": (torch.uint8, gl.uint8), "e4m3": (torch.float8_e4m3fn, gl.float8e4nv),
}  # fmt: skip


def template(tile: Tile, dtype: str) -> TensorDescriptor:
    """A descriptor of a tile of one of ``_DTYPES``, over no tensor in particular."""
    base = Pointer(_DTYPES[dtype][0])
    return TensorDescriptor(base, list(tile), [16] * (len(tile) - 1) + [1], list(tile), _layout(tile, dtype))


def vector(elements: int) -> TensorDescriptor:
    """A descriptor of ``elements`` fp32 numbers in one dimension, over no tensor in particular."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(Pointer(torch.float32), [elements], [1], [elements], layout)


def matrix(rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of rows of fp32 numbers that lie one after the other in shared memory, over no tensor in particular."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(Pointer(torch.float32), [rows, columns], [columns, 1], [rows, columns], layout)


def ragged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of [..., rows, width] for 8- or 16-bit numbers whose rows end where a copy says.

    Two dimensions come before the others and wrap around 2^64 bytes (triton.tools.ragged_tma). Row ``row`` of those that end at
    ``end`` is at RAGGED_ROWS, end, ..., RAGGED_ROWS - (end - row): the copy engine reads zeros from ``end`` on, and leaves such
    rows out where it writes.
    """
    (*outer, _, width), (*steps, of_row, _) = shape, strides
    return (MOST_ROWS, MOST_ROWS, *outer, RAGGED_ROWS.value, width), (_STRIDE - of_row, of_row, *steps, of_row, 1)


def _layout(tile: Tile, dtype: str) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(tile), _DTYPES[dtype][1])
