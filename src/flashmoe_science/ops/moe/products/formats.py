"""Tiles of a grouped product of weights in a format, whose codes become operands of tensor cores in registers (``codes.py``).

Weights are the rows of a product, tokens its columns, so that 16 tokens take a tile of 16. A thread reads codes two bytes at a
time, a unit: four weights of four bits, two of fp8. The n-th weights of all units are one operand, beside every fourth (or
second) column of the tokens: no code changes its place, and an operand is what the instruction reads.

The scale of a block of 128 x 128 multiplies the sum over its depth, in fp32, that of a channel the sum over the whole depth.
Of channels the tokens may be rounded to e4m3 by a scale of the call, static, which multiplies the same sum.
That of int4 multiplies the weight, and so does that of mxfp4, a power of two, which up to 2 is one product with the 2^126 of
e2m1: a tile is computed so, and once more, by two products a weight, where it met a greater scale or what is no number. No
model's weights are known to have one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.formats import BITS, SIDE, has_own_scales
from flashmoe_science.ops.launch import INTERPRETING, address
from flashmoe_science.ops.moe.call import MoEInputs, activation_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.codes import as_e4m3, by_place, of_fp8, of_int4, of_mxfp4, power
from flashmoe_science.ops.moe.products.tiles import dot, multiply


class Scales(NamedTuple):
    """What a product is specialised on of weights in a format: its name, strides of the scales, where the scales of the second
    half of the rows begin, in rows, how many rows have one, and columns; strides of the zero points and of the input scales."""

    name: str
    of_expert: int
    of_row: int
    of_column: int
    second: int
    high: int
    wide: int
    of_zero_points: tuple[int, int, int]
    of_inputs: int


@triton.jit
def _scales(
    scale, of_rows, k, FORMAT: tl.constexpr, DEPTH: tl.constexpr, STRIDE_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales of ``BLOCK_K`` columns from k: [BLOCK_N] of fp8 blocks, else [BLOCK_N, BLOCK_K / WIDE], at least one a row."""
    if FORMAT == "fp8_block":
        return tl.load(scale + of_rows + k // WIDE * STRIDE_K, mask=k < DEPTH, other=0)
    else:
        block = k // WIDE + tl.arange(0, max(BLOCK_K // WIDE, 1))[None, :]
        return tl.load(scale + of_rows[:, None] + block * STRIDE_K, mask=block < DEPTH // WIDE, other=0)


@triton.jit
def _zero_points(
    zero_point, rows, k, DEPTH: tl.constexpr, STRIDES: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Those of ``BLOCK_K`` columns from k, from 0 to 15, as ``_scales``: a word has those of eight rows, a byte of two."""
    block = k // WIDE + tl.arange(0, max(BLOCK_K // WIDE, 1))[None, :]
    words = (zero_point + (rows // 8).to(tl.int64)[:, None] * STRIDES[1] + block * STRIDES[2]).to(tl.pointer_type(tl.uint8))
    both = tl.load(words + (rows % 8 // 2)[:, None], mask=block < DEPTH // WIDE, other=0)
    return both.to(tl.int32) >> (rows % 2 * 4)[:, None] & 15


@triton.jit
def _as_number(scale, FORMAT: tl.constexpr, EXACT: tl.constexpr):
    """Scales as they multiply: bf16 of mxfp4, times 2^126 unless EXACT; else fp32."""
    if FORMAT == "mxfp4":
        if EXACT:
            return power(scale).to(tl.bfloat16)
        return (scale.to(tl.uint16) + 126 << 7).to(tl.bfloat16, bitcast=True)
    elif scale.dtype == tl.uint8:
        return power(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def _add(units, scale, zero_point, x, acc, FORMAT: tl.constexpr, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + W x of x [BLOCK_K, BLOCK_M], by place; of channels without their scales."""
    if FORMAT == "mxfp4":
        w = of_mxfp4(units, _as_number(scale, FORMAT, EXACT), EXACT, INTERPRET)
        return dot(w, x, acc, "tf32", INTERPRET)
    elif FORMAT == "int4":
        return dot(of_int4(units, scale, zero_point, x.dtype, INTERPRET), x, acc, "tf32", INTERPRET)
    elif FORMAT == "fp8_channel":
        return dot(of_fp8(units, x.dtype, INTERPRET), x, acc, "tf32", INTERPRET)
    else:  # the depth of a block
        scale = _as_number(scale, FORMAT, EXACT)
        none = tl.zeros(acc.shape, tl.float32)
        return acc + dot(of_fp8(units, x.dtype, INTERPRET), x, none, "tf32", INTERPRET) * scale[:, None]


@triton.jit
def _multiply(
    a_ptrs, w_ptrs, scale, zero_point, of_w, rows_first, rows_second, inside_a, by, SECOND: tl.constexpr, DEPTH: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, EXACT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The sums, [BLOCK_N, BLOCK_M], of rows ``of_w`` of weights, and of those ``SECOND`` units further; the greatest scale of
    mxfp4. Of channels without their scales. ``by``, unless it is None: tokens times it are rounded to e4m3."""
    FORMAT: tl.constexpr = SCALES[0]
    STRIDE_K: tl.constexpr = SCALES[3]
    WIDE: tl.constexpr = SCALES[6]
    UNIT: tl.constexpr = 4 if FORMAT == "mxfp4" or FORMAT == "int4" else 2
    depth, place = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // UNIT)
    first = tl.zeros([w_ptrs.shape[0], a_ptrs.shape[0]], tl.float32)  # [BLOCK_N, BLOCK_M]
    second = tl.zeros([w_ptrs.shape[0], a_ptrs.shape[0]], tl.float32)
    of_first, of_second, zero_first, zero_second, greatest = None, None, None, None, 0
    ALONG: tl.constexpr = FORMAT != "fp8_channel"  # whether scales differ along the depth
    ZEROS: tl.constexpr = zero_point is not None
    OF_ZEROS: tl.constexpr = SCALES[7]
    # Scales are read a step ahead: the compiler copies ahead no less than four bytes.
    if ALONG:
        of_first = _scales(scale, rows_first, 0, FORMAT, DEPTH, STRIDE_K, WIDE, BLOCK_K)
        if ZEROS:
            zero_first = _zero_points(zero_point, of_w, 0, DEPTH, OF_ZEROS, WIDE, BLOCK_K)
        if FORMAT == "mxfp4":
            greatest = of_first
        if SECOND is not None:
            of_second = _scales(scale, rows_second, 0, FORMAT, DEPTH, STRIDE_K, WIDE, BLOCK_K)
            if ZEROS:
                zero_second = _zero_points(zero_point, of_w + SCALES[4], 0, DEPTH, OF_ZEROS, WIDE, BLOCK_K)
    for k in tl.range(0, DEPTH, BLOCK_K, num_stages=NUM_STAGES):
        x = tl.load(a_ptrs, mask=inside_a & (k + depth < DEPTH)[None, :], other=0.0)
        if by is not None:
            x = as_e4m3(x.to(tl.float32) * by).to(x.dtype)
        x = tl.trans(by_place(x, UNIT))
        inside = None if DEPTH % BLOCK_K == 0 else (place < (DEPTH - k) // UNIT)[None, :]
        other: tl.constexpr = None if DEPTH % BLOCK_K == 0 else 0
        first = _add(tl.load(w_ptrs, mask=inside, other=other), of_first, zero_first, x, first, FORMAT, EXACT, INTERPRET)
        if FORMAT == "mxfp4":
            greatest = tl.maximum(greatest, of_first)
        if ALONG:
            of_first = _scales(scale, rows_first, k + BLOCK_K, FORMAT, DEPTH, STRIDE_K, WIDE, BLOCK_K)
            if ZEROS:
                zero_first = _zero_points(zero_point, of_w, k + BLOCK_K, DEPTH, OF_ZEROS, WIDE, BLOCK_K)
        if SECOND is not None:
            units = tl.load(w_ptrs + SECOND, mask=inside, other=other)
            second = _add(units, of_second, zero_second, x, second, FORMAT, EXACT, INTERPRET)
            if FORMAT == "mxfp4":
                greatest = tl.maximum(greatest, of_second)
            if ALONG:
                of_second = _scales(scale, rows_second, k + BLOCK_K, FORMAT, DEPTH, STRIDE_K, WIDE, BLOCK_K)
                if ZEROS:
                    zero_second = _zero_points(zero_point, of_w + SCALES[4], k + BLOCK_K, DEPTH, OF_ZEROS, WIDE, BLOCK_K)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // UNIT
    return first, second, greatest


@triton.jit
def multiply_in_format(
    a, w, scale, zero_point, input_scale, tile, rows, of_a, of_w, WIDTH: tl.constexpr, SECOND: tl.constexpr,
    DEPTH: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """``tiles.multiply`` of weights in a format, whose strides are bytes. Rows past ``WIDTH`` are computed as the last."""
    FORMAT: tl.constexpr = SCALES[0]
    HIGH: tl.constexpr = SCALES[5]
    UNIT: tl.constexpr = 4 if FORMAT == "mxfp4" or FORMAT == "int4" else 2  # weights of two bytes
    UP: tl.constexpr = None if SECOND is None else SECOND * (STRIDE_N // 2)
    depth, place = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // UNIT)
    a_ptrs = a + of_a.to(tl.int64)[:, None] * STRIDE_A + depth[None, :]  # [BLOCK_M, BLOCK_K]
    of_w = tl.minimum(of_w, WIDTH - 1)
    w_ptrs = (w + tile.expert * STRIDE_E).to(tl.pointer_type(tl.uint16))
    w_ptrs = w_ptrs + of_w.to(tl.int64)[:, None] * (STRIDE_N // 2) + place[None, :]  # [BLOCK_N, BLOCK_K / UNIT]
    scale += tile.expert * SCALES[1]
    if zero_point is not None:
        zero_point += tile.expert * SCALES[7][0]
    rows_first = (of_w // HIGH).to(tl.int64) * SCALES[2]  # [BLOCK_N]
    rows_second = ((of_w + SCALES[4]) // HIGH).to(tl.int64) * SCALES[2]
    inside_a = (rows < tile.end)[:, None]
    by, of_input = None, None
    if input_scale is not None:
        of_input = tl.load(input_scale + tile.expert * SCALES[8]).to(tl.float32)
        by = 1.0 / of_input
    first, second, greatest = _multiply(
        a_ptrs, w_ptrs, scale, zero_point, of_w, rows_first, rows_second, inside_a, by, UP, DEPTH,
        SCALES, BLOCK_K, NUM_STAGES, False, INTERPRET,
    )  # fmt: skip
    if FORMAT == "mxfp4":
        if tl.max(greatest.to(tl.int32)) > 128:
            first, second, greatest = _multiply(
                a_ptrs, w_ptrs, scale, zero_point, of_w, rows_first, rows_second, inside_a, by, UP, DEPTH,
                SCALES, BLOCK_K, NUM_STAGES, True, INTERPRET,
            )  # fmt: skip
    if FORMAT == "fp8_channel":
        first *= tl.load(scale + rows_first).to(tl.float32)[:, None]
        if SECOND is not None:
            second *= tl.load(scale + rows_second).to(tl.float32)[:, None]
    if input_scale is not None:
        first *= of_input
        second *= of_input
    return tl.trans(first), tl.trans(second)


@triton.jit
def multiply_weights(
    a, w, scale, zero_point, input_scale, tile, rows, of_a, of_w, EVEN: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr,
    DEPTH: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """``tiles.multiply``, or ``multiply_in_format`` where there are scales."""
    if SCALES is None:
        first, second = multiply(
            a, w, tile, rows, of_a, of_w, EVEN, WIDTH, SECOND,
            DEPTH, STRIDE_A, STRIDE_E, STRIDE_N, STRIDE_K, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
    else:
        first, second = multiply_in_format(
            a, w, scale, zero_point, input_scale, tile, rows, of_a, of_w, WIDTH, SECOND,
            DEPTH, STRIDE_A, STRIDE_E, STRIDE_N, SCALES, BLOCK_K, NUM_STAGES, INTERPRET,
        )  # fmt: skip
    return first, second


# The host's part -----------------------------------------------------------------------------------------------------------


def why_not_in_format(problem: MoEProblem, device: Gpu) -> str | None:
    """Why these tiles do not support a problem's weights, in words; None where they may, and of weights in no format."""
    if problem.weight_format is None:
        return None
    form = FORMATS[problem.weight_format]
    if form.w8a8 and not form.static:
        return f"{problem.weight_format} quantises tokens; it multiplies tokens of the problem's dtype"
    dtypes = ("bf16",) if form.name == "mxfp4" or form.in_blocks else ("bf16", "fp16")
    if problem.dtype not in dtypes:
        return f"weights in {problem.weight_format} are multiplied as {' or '.join(dtypes)}, and the problem is {problem.dtype}"
    if device.compute_capability[0] == 10 and problem.weight_format != "fp8_block" and activation_of(problem).halves:
        return f"Triton 3.6 fails to compile separate gates and ups of {problem.weight_format} for {device.name}"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 2:
            return f"{name} is {size}; codes of {problem.weight_format} are read in pairs"
    return None


def configs_in_format(problem: MoEProblem, device: Gpu) -> tuple[Config, ...]:
    """Tiles by rows an expert, the best guess first, by reckoning: none has been measured. fp8 has a scale a step."""
    rows, wgmma = problem.rows_per_expert(), device.compute_capability[0] == 9
    if rows <= 8:
        tiles = [(16, 128, 128, 4, 5), (16, 64, 128, 4, 6), (16, 64, 256, 4, 4)]
        if problem.touched() * problem.rows_of_w1() < 2 * 128 * device.sm_count:  # smaller tiles take every SM
            tiles = [tiles[1], tiles[0], tiles[2]]
    elif rows <= 24:
        tiles = [(32, 128, 128, 4, 5), (32, 64, 128, 4, 5), (16, 128, 128, 4, 5)]
    elif rows <= 48:
        tiles = [(64, 256, 64, 8, 4), (32, 128, 128, 4, 5)]
        tiles += [(64, 128, 128, 4, 4)] if wgmma else []  # it spills where mma.sync is
    else:
        tiles = [(128, 128, 64, 8, 4), (64, 256, 64, 8, 4)]
        if wgmma and problem.weight_format == "mxfp4":  # half the upcasts; the sums of blocks would spill, and mma.sync's
            tiles = [(128, 256, 64, 8, 3), *tiles]
    if FORMATS[str(problem.weight_format)].bits == 8:
        tiles = [(m, max(n, 128), min(k, 128), warps, 4) for m, n, k, warps, _ in tiles]
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
    return tuple(Config(**dict(zip(names, tile, strict=True))) for tile in dict.fromkeys(tiles))


def in_bytes(inputs: MoEInputs) -> MoEInputs:
    """The inputs, of weights in a format their bytes. Raises CannotServe: codes that cannot be read two bytes at a time."""
    if inputs.problem.weight_format is None:
        return inputs
    for codes in (inputs.tensors.w1, inputs.tensors.w2):
        along, *others = codes.stride(2), codes.data_ptr(), *(codes.element_size() * one for one in codes.stride()[:2])
        if along != 1 or any(one % 2 for one in others):
            raise CannotServe(f"weights have strides {codes.stride()}; it reads codes that follow each other, in pairs")
    w1, w2 = (codes.view(torch.uint8) for codes in (inputs.tensors.w1, inputs.tensors.w2))
    return replace(inputs, tensors=inputs.tensors._replace(w1=w1, w2=w2))


def _bytes_of_codes(weights: torch.Tensor) -> Any:
    return address(weights.view(torch.uint8) if weights.dtype in BITS else weights)


# ``address`` of weights or of their codes, which are read as bytes.
address_of_weights: Callable[[torch.Tensor], Any] = _bytes_of_codes if INTERPRETING else address


def scales_in_format(inputs: MoEInputs) -> tuple[Scales, Scales]:
    """The scales of both products."""
    name, tensors = inputs.problem.weight_format, inputs.tensors
    made = []
    assert name is not None
    in_format = tensors.in_format()
    assert in_format is not None
    rest = (inputs.activation.halves, tensors.gate_up_input_scale), (False, tensors.down_input_scale)
    for (codes, scale, zero_point), (halves, input_scale) in zip(in_format, rest, strict=True):
        half = codes.shape[1] // 2
        own = name.startswith("fp8_block") and halves and has_own_scales(codes.shape[1], scale.shape[1])
        of_expert, of_row, of_column = (*scale.stride(), 0)[:3]
        second = -(-half // SIDE) * SIDE if own else half
        high, wide = FORMATS[name].block
        high = codes.shape[1] // scale.shape[1] if FORMATS[name].in_channels else high
        of_zeros = (0, 0, 0) if zero_point is None else zero_point.stride()
        of_inputs = 0 if input_scale is None else input_scale.stride(0)
        made.append(Scales(name.partition("_g")[0], of_expert, of_row, of_column, second, high, wide or 0, of_zeros, of_inputs))
    return made[0], made[1]
