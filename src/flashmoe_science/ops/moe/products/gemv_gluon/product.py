"""The sums of a few rows of an expert's weights in a format times a few tokens: what a program reads first, then multiplies."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flashmoe_science.ops.gluon_bridge import as_gluon
from flashmoe_science.ops.moe.products.codes import in_e4m3, power
from flashmoe_science.ops.moe.products.gemv_gluon.operands import (
    CHUNK,
    THREADS,
    TOKENS,
    block_layout,
    bytes_of,
    column_of,
    numbers,
    of_tokens,
    quantized,
    result_layout,
    spread,
    upcast,
)

NONE = gl.constexpr(2**31 - 1)  # of no pair, and of no expert
_CHUNK: int = CHUNK.value
_in_e4m3, _power = as_gluon(in_e4m3), as_gluon(power)


class Rows(NamedTuple):
    """Pointers to the rows of weights of each warp's expert, at its first chunk, and whether it has an expert."""

    codes: Any  # [warps, rows, 4, bytes]
    scales: Any  # [warps, rows, 1] or, by the columns of a thread, [warps, rows, 4, 1]
    zeros: Any  # [warps, rows, 4, 1]
    shift: Any  # of a zero point in its word, [1, rows, 1, 1]
    here: Any  # [warps]
    chunk: Any  # [warps], the first


@gluon.constexpr_function
def by_thread(scales: Any) -> bool:
    """Whether threads that share a chunk have scales of their own, which their weights are multiplied by."""
    return bool(scales[0] == "mxfp4" or (scales[0] == "int4" and scales[6] < _CHUNK))


@gluon.constexpr_function
def form_of(scales: Any) -> str:
    """As ``operands.upcast`` knows it."""
    name: str = scales[0]
    if name == "mxfp4":
        return name
    if in_fp8(scales) and name not in ("fp8_block", "fp8_channel"):
        return "fp8 w8a8"
    return "fp8" if in_fp8(scales) else "int4 scaled" if by_thread(scales) else "int4"


@gluon.constexpr_function
def with_zeros(scales: Any) -> bool:
    """Whether there are zero points."""
    return any(scales[7])


@gluon.constexpr_function
def in_fp8(scales: Any) -> bool:
    """Whether a code is a byte."""
    return bool(scales[0].startswith("fp8"))


@gluon.constexpr_function
def in_channels(scales: Any) -> bool:
    """Whether a row has one scale."""
    return bool(scales[0].startswith("fp8_channel"))


@gluon.constexpr_function
def steps_of(part: int, steps: int, each: int) -> int:
    """Steps of the ``part``-th of ``each`` steps, which are taken ``steps`` at a time."""
    return min(steps, each - part * steps)


@gluon.constexpr_function
def inside_of(step: int, by: int, depth: int) -> bool:
    """Whether all chunks of a step are whole."""
    return (step + 1) * by * _CHUNK <= depth


@gluon.jit
def byte_of(chunk, q, n, FP8: gl.constexpr):
    """In a row, of the n-th byte that a thread has of a chunk."""
    if FP8:
        return chunk * CHUNK + column_of(q, n, FP8)
    else:
        return chunk * (CHUNK // 2) + q * (CHUNK // 2 // THREADS) + n


@gluon.jit
def row_of(nth, first, WIDTH: gl.constexpr, UPS: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Of weights, the n-th of a program whose first result is ``first``: eight gates and then their ups, which are ``UPS`` rows
    further, or alternate. ``UPS`` of 0: neither. Past the last result it is the last's."""
    if INTERLEAVED:
        return 2 * gl.minimum(first + nth // 16 * 8 + nth % 8, WIDTH - 1) + nth // 8 % 2
    elif UPS > 0:
        return gl.minimum(first + nth // 16 * 8 + nth % 8, WIDTH - 1) + nth // 8 % 2 * UPS
    else:
        return gl.minimum(first + nth, WIDTH - 1)


@gluon.jit
def rows_of(
    w, scale, zero_point, expert, here, chunk, first,
    WIDTH: gl.constexpr, UPS: gl.constexpr, INTERLEAVED: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr,
    SCALES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """``Rows`` of experts [warps]."""
    FP8: gl.constexpr = in_fp8(SCALES)
    BYTES: gl.constexpr = bytes_of(FP8)
    UP_SCALES: gl.constexpr = SCALES[4] if UPS > 0 else 0
    block: gl.constexpr = block_layout(WARPS, ROWS, BYTES)
    result: gl.constexpr = result_layout(WARPS)
    nth = numbers(ROWS, 1, block, 4)
    q = numbers(THREADS, 2, block, 4)
    row = row_of(nth, first, WIDTH, UPS, INTERLEAVED)
    of_expert = spread(expert.to(gl.int64), 0, block, 4)
    at = byte_of(spread(chunk, 0, block, 4), q, numbers(BYTES, 3, block, 4), FP8)
    codes = w + of_expert * STRIDE_E + row.to(gl.int64) * STRIDE_N + at
    zeros = codes
    shift = nth
    of_scale = row_of(nth, first, WIDTH, UP_SCALES, INTERLEAVED)
    if by_thread(SCALES):
        group = spread(chunk, 0, block, 4) * (CHUNK // SCALES[6]) + q
        scales = scale + of_expert * SCALES[1] + (of_scale * SCALES[2] + group * SCALES[3])
    else:
        of_scale = row_of(numbers(ROWS, 1, result, 3), first, WIDTH, UP_SCALES, INTERLEAVED) // SCALES[5]
        scales = scale + spread(expert.to(gl.int64), 0, result, 3) * SCALES[1] + of_scale * SCALES[2]
        if not in_channels(SCALES):
            scales += spread(chunk, 0, result, 3) * SCALES[3]
    if with_zeros(SCALES):
        group = spread(chunk, 0, block, 4) * (CHUNK // SCALES[6]) + q * (CHUNK // THREADS) // SCALES[6]
        zeros = zero_point + of_expert * SCALES[7][0] + (row // 8 * SCALES[7][1] + group * SCALES[7][2])
        shift = row % 8 * 4
    return Rows(codes, scales, zeros, shift, here, chunk)


@gluon.jit
def _read(
    rows, STEP: gl.constexpr, DEPTH: gl.constexpr, SCALES: gl.constexpr, ROWS: gl.constexpr, BY: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """(codes, scales, zero points) of each warp's chunk so many steps, of ``BY`` chunks, further."""
    FP8: gl.constexpr = in_fp8(SCALES)
    BYTES: gl.constexpr = bytes_of(FP8)
    block: gl.constexpr = block_layout(WARPS, ROWS, BYTES)
    result: gl.constexpr = result_layout(WARPS)
    q = numbers(THREADS, 2, block, 4)
    chunk = spread(rows.chunk, 0, block, 4) + STEP * BY
    first = chunk * CHUNK
    here = spread(rows.here, 0, block, 4)
    inside = here & (byte_of(chunk, q, numbers(BYTES, 3, block, 4), FP8) < (DEPTH if FP8 else DEPTH // 2))
    codes = gl.load(rows.codes + STEP * BY * (CHUNK if FP8 else CHUNK // 2), mask=inside, other=0)
    scale = 0
    zero = 0
    if by_thread(SCALES):
        inside = here & (first + q * (CHUNK // THREADS) < DEPTH)
        scale = gl.load(rows.scales + STEP * BY * (CHUNK // SCALES[6]) * SCALES[3], mask=inside, other=0)
    elif not in_channels(SCALES):
        inside = spread(rows.here, 0, result, 3) & ((spread(rows.chunk, 0, result, 3) + STEP * BY) * CHUNK < DEPTH)
        scale = gl.load(rows.scales + STEP * BY * SCALES[3], mask=inside, other=0)
    if with_zeros(SCALES):
        inside = here & (first + q * (CHUNK // THREADS) < DEPTH)
        zero = gl.load(rows.zeros + STEP * BY * (CHUNK // SCALES[6]) * SCALES[7][2], mask=inside, other=0)
    return codes, scale, zero


@gluon.jit
def read(
    rows, FIRST: gl.constexpr, STEPS: gl.constexpr, DEPTH: gl.constexpr, SCALES: gl.constexpr, ROWS: gl.constexpr,
    BY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(codes, scales, zero points) of each of so many steps: all of it is on its way before ``multiply`` uses any."""
    held = ()
    for step in gl.static_range(STEPS):
        held = held + _read(rows, FIRST + step, DEPTH, SCALES, ROWS, BY, WARPS)
    return held


@gluon.jit
def _operand(codes, scale, zero, shift, SCALES: gl.constexpr, DTYPE: gl.constexpr, operand: gl.constexpr):
    """The weights [warps, rows, 128] of a chunk."""
    FORMAT: gl.constexpr = form_of(SCALES)
    if FORMAT == "mxfp4":
        scale = scale.to(gl.int32)
    elif FORMAT == "int4 scaled":
        scale = scale.to(gl.int16, bitcast=True).to(gl.int32) * 0x00010001
    if FORMAT == "int4" or FORMAT == "int4 scaled":
        if with_zeros(SCALES):
            zero = zero >> shift & 15
        else:
            layout: gl.constexpr = codes.type.layout
            zero = gl.full([1, 1, 1, 1], 8, gl.int32, layout)
    return upcast(codes, scale, zero, FORMAT, DTYPE, operand)


@gluon.jit
def multiply(
    acc, held, rows, x, at, of_input, FIRST: gl.constexpr, STEPS: gl.constexpr, DEPTH: gl.constexpr, SCALES: gl.constexpr,
    ROWS: gl.constexpr, BY: gl.constexpr, WARPS: gl.constexpr, STRIDE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The sums ``acc`` [warps, rows, 8] and those of the steps that were ``read``: of the rows ``at``, [warps or 1, 8], of
    ``x``. Of channels without their scales, nor those of the input, [warps], if ``of_input`` is not None."""
    FORMAT: gl.constexpr = form_of(SCALES)
    FP8: gl.constexpr = in_fp8(SCALES)
    tokens: gl.constexpr = block_layout(WARPS, TOKENS, CHUNK // THREADS)
    result: gl.constexpr = result_layout(WARPS)
    K_WIDTH: gl.constexpr = 4 if FORMAT == "fp8 w8a8" else 2
    DYNAMIC: gl.constexpr = FORMAT == "fp8 w8a8" and of_input is None
    column = column_of(numbers(THREADS, 2, tokens, 4), numbers(CHUNK // THREADS, 3, tokens, 4), FP8)
    column += spread(rows.chunk, 0, tokens, 4) * CHUNK
    row = gl.convert_layout(at, gl.SliceLayout(2, gl.SliceLayout(3, tokens)), assert_trivial=True)
    x_ptrs = x + (gl.expand_dims(gl.expand_dims(row, 2), 3) * STRIDE + column)
    for step in gl.static_range(STEPS):
        a = _operand(
            held[3 * step], held[3 * step + 1], held[3 * step + 2], rows.shift, SCALES, DTYPE,
            gl.DotOperandLayout(0, result, K_WIDTH),
        )  # fmt: skip
        further = (FIRST + step) * BY * CHUNK
        if inside_of(FIRST + step, BY, DEPTH):
            b = gl.load(x_ptrs + further)
        else:
            b = gl.load(x_ptrs + further, mask=column + further < DEPTH, other=0.0)
        if DYNAMIC:
            b, of_b = quantized(b)
        elif FORMAT == "fp8 w8a8":
            b = _in_e4m3(b.to(gl.float32) * spread(1.0 / of_input, 0, tokens, 4)).to(gl.float8e4nv)
        b = of_tokens(b, FORMAT, gl.DotOperandLayout(1, result, K_WIDTH))
        if by_thread(SCALES) or (in_channels(SCALES) and not DYNAMIC):
            acc = mma_v2(a, b, acc)
        else:
            part = mma_v2(a, b, gl.zeros([WARPS, ROWS, TOKENS], gl.float32, result))
            if DYNAMIC:
                of_b = gl.expand_dims(gl.convert_layout(of_b, gl.SliceLayout(1, result)), 1)
            if in_channels(SCALES):
                by = of_b
            else:
                scale = held[3 * step + 1]
                by = _power(scale) if scale.dtype == gl.uint8 else scale.to(gl.float32)
                if DYNAMIC:
                    by = by * of_b
            acc = acc + part * by
    return acc


@gluon.jit
def of_channels(acc, rows, of_input, SCALES: gl.constexpr, WARPS: gl.constexpr):
    """The sums times the scales of their rows and of the input, of channels."""
    if of_input is not None:
        acc = acc * spread(of_input, 0, result_layout(WARPS), 3)
    if in_channels(SCALES):
        scale = gl.load(rows.scales, mask=spread(rows.here, 0, result_layout(WARPS), 3), other=0.0)
        acc = acc * scale.to(gl.float32)
    return acc
