"""Weights in a format and tokens as the operands of mma.sync, in registers, without moving data between threads.

A chunk is 128 columns of a row. Four threads, q, share it: of four bits each has 16 bytes, 32 columns; of fp8 16 bytes of each
half. In the operand a thread has of each 16 columns its 2q, 2q + 1, 2q + 8 and 2q + 9. So the columns are permuted inside a
chunk, and those of the tokens with them. Warps are the first dimension: each multiplies chunks, or experts, of its own.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.moe.products.codes import LARGEST
from flashmoe_science.ops.moe.products.fp8_sm90.quantize import LEAST
from flashmoe_science.ops.moe.products.words import (
    BYTES,
    FP8_AS_BF16,
    FP8_AS_FP16,
    INT4_AS_BF16,
    INT4_AS_FP16,
    INT4_SCALED_AS_BF16,
    INT4_SCALED_AS_FP16,
    MXFP4,
)

CHUNK = gl.constexpr(128)
TOKENS = gl.constexpr(8)  # columns of a product
THREADS = gl.constexpr(4)  # of a chunk


@gluon.constexpr_function
def _bits(size: int, dim: int, rank: int, first: int = 0) -> list[list[int]]:
    return [[1 << n if one == dim else 0 for one in range(rank)] for n in range(first, size.bit_length() - 1)]


@gluon.constexpr_function
def block_layout(warps: int, rows: int, columns: int) -> Any:
    """Of [warps, rows, 4, columns]: a thread has the columns of one q, in rows eight apart."""
    inside = [*_bits(columns, 3, 4), *_bits(rows, 1, 4, 3)]
    lanes = [*_bits(4, 2, 4), *_bits(8, 1, 4)]
    return gl.DistributedLinearLayout(inside, lanes, _bits(warps, 0, 4), [], [warps, rows, 4, columns])


@gluon.constexpr_function
def places_layout(warps: int, parts: int, places: int, of_columns: bool) -> Any:
    """Of [parts, 8, places]: a thread has all places of a token, that of its rows of tokens, or those of its columns of a
    result. ``parts``: as many as warps, or 1."""
    none, token = [0, 0, 0], _bits(8, 1, 3)
    inside = [*_bits(places, 2, 3), *(token[:1] if of_columns else [])]
    lanes = [*token[1:], none, none, none] if of_columns else [none, none, *token]
    of_warps = _bits(warps, 0, 3) if parts > 1 else [none for _ in _bits(warps, 0, 3)]
    return gl.DistributedLinearLayout(inside, lanes, of_warps, [], [parts, 8, places])


@gluon.constexpr_function
def result_layout(warps: int) -> Any:
    """Of sums [warps, rows, 8]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def along(layout: Any, dim: int, rank: int) -> Any:
    """Of one dimension of a layout."""
    for other in reversed(range(rank)):
        layout = layout if other == dim else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def spread(value, DIM: gl.constexpr, layout: gl.constexpr, RANK: gl.constexpr):
    """A tensor of one dimension as the ``DIM``-th of ``RANK``."""
    value = gl.convert_layout(value, along(layout, DIM, RANK), assert_trivial=True)
    for dim in gl.static_range(RANK):
        if dim != DIM:
            value = gl.expand_dims(value, dim)
    return value


@gluon.jit
def numbers(SIZE: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr, RANK: gl.constexpr):
    """From 0, along a dimension."""
    return spread(gl.arange(0, SIZE, along(layout, DIM, RANK)), DIM, layout, RANK)


@gluon.constexpr_function
def bytes_of(in_fp8: bool) -> int:
    """That a thread has of a chunk."""
    return 32 if in_fp8 else 16


@gluon.jit
def column_of(q, n, FP8: gl.constexpr):
    """In a chunk, of the n-th column of a thread."""
    if FP8:
        return n // BYTES * (CHUNK // 2) + q * BYTES + n % BYTES
    else:
        return q * (CHUNK // THREADS) + n


@gluon.jit
def _every_byte(value, like):
    """[.., bytes] of numbers [.., 1]."""
    layout: gl.constexpr = like.type.layout
    return value + gl.zeros(like.shape, gl.int32, layout)


@gluon.jit
def _made(assembly: gl.constexpr, given, DTYPE: gl.constexpr):
    """The two results of 16 bytes of four bits each, of the dtype."""
    if gl.float16 == DTYPE:
        return gl.inline_asm_elementwise(assembly[0], assembly[1], given, (gl.float16, gl.float16), True, BYTES)
    else:
        return gl.inline_asm_elementwise(assembly[0], assembly[1], given, (gl.bfloat16, gl.bfloat16), True, BYTES)


@gluon.jit
def _of_four_bits(codes, scale, zero, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    if FORMAT == "mxfp4":
        factor = gl.minimum(scale, 128) * 0x00800080 + 0x3F003F00
        return _made(MXFP4, (codes, _every_byte(factor, codes), _every_byte(scale, codes)), DTYPE)
    less = _every_byte((zero + (0xE400 if gl.float16 == DTYPE else 0xC300)) * 0x00010001, codes)
    if FORMAT == "int4 scaled":
        scaled: gl.constexpr = INT4_SCALED_AS_FP16 if gl.float16 == DTYPE else INT4_SCALED_AS_BF16
        return _made(scaled, (codes, less, _every_byte(scale, codes)), DTYPE)
    assembly: gl.constexpr = INT4_AS_FP16 if gl.float16 == DTYPE else INT4_AS_BF16
    return _made(assembly, (codes, less), DTYPE)


@gluon.jit
def _of_fp8(codes, DTYPE: gl.constexpr):
    if gl.float16 == DTYPE:
        return gl.inline_asm_elementwise(FP8_AS_FP16[0], FP8_AS_FP16[1], [codes], gl.float16, True, BYTES)
    else:
        return gl.inline_asm_elementwise(FP8_AS_BF16[0], FP8_AS_BF16[1], [codes], gl.bfloat16, True, BYTES)


@gluon.jit
def upcast(codes, scale, zero, FORMAT: gl.constexpr, DTYPE: gl.constexpr, operand: gl.constexpr):
    """[warps, rows, CHUNK] of a chunk's codes, with their scales of mxfp4 and of groups of 32, else without."""
    W: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = codes.shape[1]
    if FORMAT == "fp8 w8a8":
        values = codes.to(gl.float8e4nv, bitcast=True).reshape([W, ROWS, 4, 4, 2, 4]).permute(0, 1, 3, 4, 2, 5)
    elif FORMAT == "fp8":
        values = _of_fp8(codes, DTYPE).reshape([W, ROWS, 4, 8, 2, 2]).permute(0, 1, 3, 4, 2, 5)  # [.., q, word, n, half]
    else:
        one, two = _of_four_bits(codes, scale, zero, FORMAT, DTYPE)
        values = gl.join(one, two).reshape([W, ROWS, 4, 4, 2, 2, 2])
        values = values.permute(0, 1, 3, 6, 4, 2, 5)  # [.., q, word, n, half, n of 2]
    return gl.convert_layout(values.reshape([W, ROWS, CHUNK]), operand, assert_trivial=True)


@gluon.jit
def of_tokens(x, FORMAT: gl.constexpr, operand: gl.constexpr):
    """[warps, CHUNK, 8] of the tokens' columns [warps, 8, 4, 32] of a chunk, in the order of ``upcast``."""
    W: gl.constexpr = x.shape[0]
    if FORMAT == "fp8 w8a8":
        x = x.reshape([W, TOKENS, 4, 4, 2, 4]).permute(0, 3, 4, 2, 5, 1)
    elif FORMAT == "fp8":
        x = x.reshape([W, TOKENS, 4, 8, 2, 2]).permute(0, 3, 5, 2, 4, 1)  # [.., q, word, half, n]
    else:
        x = x.reshape([W, TOKENS, 4, 4, 2, 2, 2]).permute(0, 3, 5, 6, 2, 4, 1)  # [.., q, word, half, n of 2, n]
    return gl.convert_layout(x.reshape([W, CHUNK, TOKENS]), operand, assert_trivial=True)


@gluon.jit
def quantized(x):
    """e4m3 of the tokens' columns of a chunk, and their scales [warps, 8]."""
    x = x.to(gl.float32)
    scale = gl.max(gl.max(gl.abs(x), 3), 2)
    layout: gl.constexpr = scale.type.layout
    scale = gl.maximum(gl.div_rn(scale, gl.full(scale.shape, LARGEST, gl.float32, layout)), LEAST)
    inverse = gl.div_rn(gl.full(scale.shape, 1.0, gl.float32, layout), scale)
    return (x * gl.expand_dims(gl.expand_dims(inverse, 2), 3)).to(gl.float8e4nv), scale
