"""Tiles of a grouped product of weights in a format: codes become bf16 in registers, exactly, for tensor cores.

Weights are the rows of a product, tokens its columns, so that 16 tokens take a tile of 16. A thread reads codes two bytes at a
time, a unit: four weights of mxfp4, two of fp8 blocks. The n-th weights of all units are one operand, beside every fourth (or
second) column of the tokens: no code changes its place, and an operand is what the instruction reads.

e2m1 and e4m3 are bf16 with another bias: shifted to their places, and times 2^126 or 2^120, a code is its value, with numbers
below the least normal one too. The scale of a block of 128 x 128 multiplies the sum over its depth, in fp32. That of mxfp4, a
power of two, multiplies the weight, and up to 2 is one product with the 2^126: a tile is computed so, and once more, by two
products a weight, where it met a greater scale or what is no number. No model's weights are known to have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.formats import CODES, SIDE, has_own_scales
from flashmoe_science.ops.launch import INTERPRETING, Pointer, address
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.tiles import dot


class Scales(NamedTuple):
    """What a product is specialised on of weights in a format: its name, strides of the scales, and where the scales of the
    second half of the rows begin, in rows."""

    name: str
    of_expert: int
    of_row: int
    of_column: int
    second: int


# Of two units in $4: the n-th weights of both in $n, times $5. A product puts the four bits of a code twice, for its sign and
# for the rest.
_E2M1 = """{
.reg .b32 u, m, none;
mov.b32 none, 0x80008000;
shr.b32 u, $4, 8;
and.b32 m, $4, 0x000F000F;
mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0;
fma.rn.bf16x2 $0, m, $5, none;
and.b32 m, $4, 0x00F000F0;
mul.lo.u32 m, m, 0x104;
and.b32 m, m, 0x81C081C0;
fma.rn.bf16x2 $1, m, $5, none;
and.b32 m, u, 0x000F000F;
mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0;
fma.rn.bf16x2 $2, m, $5, none;
and.b32 m, u, 0x00F000F0;
mul.lo.u32 m, m, 0x104;
and.b32 m, m, 0x81C081C0;
fma.rn.bf16x2 $3, m, $5, none;
}"""
# Of two units in $2; (a & b) | c is lop3's 0xEA. A code that is no number makes its row's sum none, wherever it is in the row.
_E4M3 = """{
.reg .b32 u, m, big, none;
.reg .pred p;
mov.b32 big, 0x7B807B80;
mov.b32 none, 0x80008000;
shl.b32 u, $2, 8;
shl.b32 m, $2, 4;
and.b32 m, m, 0x07F007F0;
lop3.b32 m, u, 0x80008000, m, 0xEA;
fma.rn.bf16x2 $0, m, big, none;
shr.b32 m, $2, 4;
and.b32 m, m, 0x07F007F0;
lop3.b32 m, $2, 0x80008000, m, 0xEA;
fma.rn.bf16x2 $1, m, big, none;
and.b32 m, $2, 0x7F7F7F7F;
add.u32 m, m, 0x01010101;
and.b32 m, m, 0x80808080;
setp.ne.u32 p, m, 0;
@p mov.b32 $0, 0x7FC07FC0;
}"""
_E2M1_ASM, _E4M3_ASM = tl.constexpr(_E2M1), tl.constexpr(_E4M3)


@triton.jit
def _as_fp32(bits):
    """fp32 of the bits of bf16."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _power(code):
    """fp32 of e8m0."""
    code = code.to(tl.int32)
    return _as_fp32(tl.where(code == 0, 0x40, tl.where(code == 255, 0x7FC0, code << 7)))


@triton.jit
def _of_e2m1(units, by, NTH: tl.constexpr):
    """fp32 of the n-th codes of units times ``by``, without instructions of a GPU's own."""
    code = units.to(tl.int32) >> 4 * NTH
    return _as_fp32((code & 8) << 12 | (code & 7) << 6) * by.to(tl.float32)


@triton.jit
def _of_e4m3(units, NTH: tl.constexpr):
    code = units.to(tl.int32) >> 8 * NTH
    value = _as_fp32((code & 0x80) << 8 | (code & 0x7F) << 4) * 2.0**120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _by_place(tile, UNIT: tl.constexpr):
    """[rows, columns] with the columns of each place in a unit together: the first of all units, then the second."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(tile, [ROWS, COLUMNS // UNIT, UNIT]), (0, 2, 1)), [ROWS, COLUMNS])


@triton.jit
def _of_mxfp4(units, scale, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """bf16 weights [BLOCK_N, BLOCK_K], by place, of units [BLOCK_N, BLOCK_K / 4] and scales [BLOCK_N, BLOCK_K / 32]."""
    ROWS: tl.constexpr = units.shape[0]
    UNITS: tl.constexpr = units.shape[1]
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, UNITS // 8, 8]), [ROWS, UNITS])
    by = tl.full([ROWS, UNITS], 2.0**126, tl.float32).to(tl.bfloat16) if EXACT else scale
    if INTERPRET:
        w_0, w_1, w_2, w_3 = _of_e2m1(units, by, 0), _of_e2m1(units, by, 1), _of_e2m1(units, by, 2), _of_e2m1(units, by, 3)
    else:
        w_0, w_1, w_2, w_3 = tl.inline_asm_elementwise(
            _E2M1_ASM, "=&r,=&r,=&r,=r,r,r", [units, by], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    if EXACT:
        w_0, w_1, w_2, w_3 = w_0 * scale, w_1 * scale, w_2 * scale, w_3 * scale
    every = tl.join(tl.join(w_0, w_2), tl.join(w_1, w_3))  # [BLOCK_N, BLOCK_K / 4, 2, 2]
    return tl.reshape(tl.permute(every, (0, 2, 3, 1)), [ROWS, 4 * UNITS])


@triton.jit
def _of_fp8_block(units, INTERPRET: tl.constexpr):
    """bf16 codes [BLOCK_N, BLOCK_K], by place, of units [BLOCK_N, BLOCK_K / 2]."""
    if INTERPRET:
        w_0, w_1 = _of_e4m3(units, 0), _of_e4m3(units, 1)
    else:
        w_0, w_1 = tl.inline_asm_elementwise(
            _E4M3_ASM, "=&r,=&r,r", [units], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )  # fmt: skip
    return tl.reshape(tl.permute(tl.join(w_0, w_1), (0, 2, 1)), [units.shape[0], 2 * units.shape[1]])


@triton.jit
def _scales(scale, of_rows, k, FORMAT: tl.constexpr, DEPTH: tl.constexpr, STRIDE_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp32 scales of ``BLOCK_K`` columns from k: [BLOCK_N, BLOCK_K / 32] of mxfp4, [BLOCK_N] of fp8 blocks."""
    if FORMAT == "mxfp4":
        block = k // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
        return tl.load(scale + of_rows[:, None] + block * STRIDE_K, mask=block < DEPTH // 32, other=0)
    else:
        return tl.load(scale + of_rows + k // 128 * STRIDE_K, mask=k < DEPTH, other=0)


@triton.jit
def _as_number(scale, FORMAT: tl.constexpr, EXACT: tl.constexpr):
    """Scales as they multiply: bf16 of mxfp4, times 2^126 unless EXACT; else fp32."""
    if FORMAT == "mxfp4":
        if EXACT:
            return _power(scale).to(tl.bfloat16)
        return (scale.to(tl.uint16) + 126 << 7).to(tl.bfloat16, bitcast=True)
    elif scale.dtype == tl.uint8:
        return _power(scale)
    else:
        return scale


@triton.jit
def _add(units, scale, x, acc, FORMAT: tl.constexpr, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + W x of x [BLOCK_K, BLOCK_M], by place."""
    scale = _as_number(scale, FORMAT, EXACT)
    if FORMAT == "mxfp4":
        return dot(_of_mxfp4(units, scale, EXACT, INTERPRET), x, acc, "tf32", INTERPRET)
    else:  # the depth of a block
        none = tl.zeros(acc.shape, tl.float32)
        return acc + dot(_of_fp8_block(units, INTERPRET), x, none, "tf32", INTERPRET) * scale[:, None]


@triton.jit
def _multiply(
    a_ptrs, w_ptrs, scale, rows_first, rows_second, inside_a, SECOND: tl.constexpr, DEPTH: tl.constexpr,
    FORMAT: tl.constexpr, STRIDE_K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    EXACT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The sums, [BLOCK_N, BLOCK_M], of rows of weights, and of those ``SECOND`` units further; the greatest scale of mxfp4."""
    UNIT: tl.constexpr = 4 if FORMAT == "mxfp4" else 2
    depth, place = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // UNIT)
    first = tl.zeros([w_ptrs.shape[0], a_ptrs.shape[0]], tl.float32)  # [BLOCK_N, BLOCK_M]
    second = tl.zeros([w_ptrs.shape[0], a_ptrs.shape[0]], tl.float32)
    # Scales are read a step ahead: the compiler copies ahead no less than four bytes.
    of_first = _scales(scale, rows_first, 0, FORMAT, DEPTH, STRIDE_K, BLOCK_K)
    greatest = of_first
    if SECOND is not None:
        of_second = _scales(scale, rows_second, 0, FORMAT, DEPTH, STRIDE_K, BLOCK_K)
    for k in tl.range(0, DEPTH, BLOCK_K, num_stages=NUM_STAGES):
        x = tl.load(a_ptrs, mask=inside_a & (k + depth < DEPTH)[None, :], other=0.0)
        x = tl.trans(_by_place(x, UNIT))
        inside = None if DEPTH % BLOCK_K == 0 else (place < (DEPTH - k) // UNIT)[None, :]
        other: tl.constexpr = None if DEPTH % BLOCK_K == 0 else 0
        first = _add(tl.load(w_ptrs, mask=inside, other=other), of_first, x, first, FORMAT, EXACT, INTERPRET)
        greatest = tl.maximum(greatest, of_first)
        of_first = _scales(scale, rows_first, k + BLOCK_K, FORMAT, DEPTH, STRIDE_K, BLOCK_K)
        if SECOND is not None:
            units = tl.load(w_ptrs + SECOND, mask=inside, other=other)
            second = _add(units, of_second, x, second, FORMAT, EXACT, INTERPRET)
            greatest = tl.maximum(greatest, of_second)
            of_second = _scales(scale, rows_second, k + BLOCK_K, FORMAT, DEPTH, STRIDE_K, BLOCK_K)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // UNIT
    return first, second, greatest


@triton.jit
def multiply_in_format(
    a, w, scale, tile, rows, of_a, of_w, WIDTH: tl.constexpr, SECOND: tl.constexpr,
    DEPTH: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """``tiles.multiply`` of weights in a format, whose strides are bytes. Rows past ``WIDTH`` are computed as the last."""
    FORMAT: tl.constexpr = SCALES[0]
    HIGH: tl.constexpr = 1 if FORMAT == "mxfp4" else 128  # rows of a scale
    UNIT: tl.constexpr = 4 if FORMAT == "mxfp4" else 2  # weights of two bytes
    UP: tl.constexpr = None if SECOND is None else SECOND * (STRIDE_N // 2)
    depth, place = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // UNIT)
    a_ptrs = a + of_a.to(tl.int64)[:, None] * STRIDE_A + depth[None, :]  # [BLOCK_M, BLOCK_K]
    of_w = tl.minimum(of_w, WIDTH - 1)
    w_ptrs = (w + tile.expert * STRIDE_E).to(tl.pointer_type(tl.uint16))
    w_ptrs = w_ptrs + of_w.to(tl.int64)[:, None] * (STRIDE_N // 2) + place[None, :]  # [BLOCK_N, BLOCK_K / UNIT]
    scale += tile.expert * SCALES[1]
    rows_first = (of_w // HIGH).to(tl.int64) * SCALES[2]  # [BLOCK_N]
    rows_second = ((of_w + SCALES[4]) // HIGH).to(tl.int64) * SCALES[2]
    inside_a = (rows < tile.end)[:, None]
    first, second, greatest = _multiply(
        a_ptrs, w_ptrs, scale, rows_first, rows_second, inside_a, UP, DEPTH,
        FORMAT, SCALES[3], BLOCK_K, NUM_STAGES, False, INTERPRET,
    )  # fmt: skip
    if FORMAT == "mxfp4":
        if tl.max(greatest.to(tl.int32)) > 128:
            first, second, greatest = _multiply(
                a_ptrs, w_ptrs, scale, rows_first, rows_second, inside_a, UP, DEPTH,
                FORMAT, SCALES[3], BLOCK_K, NUM_STAGES, True, INTERPRET,
            )  # fmt: skip
    return tl.trans(first), tl.trans(second)


# The host's part -----------------------------------------------------------------------------------------------------------


def why_not_in_format(problem: MoEProblem) -> str | None:
    """Why these tiles do not support a problem's weights, in words; None where they may, and of weights in no format."""
    if problem.weight_format is None:
        return None
    if problem.dtype != "bf16":
        return f"weights in {problem.weight_format} are multiplied as bf16, and the problem is {problem.dtype}"
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
    if problem.weight_format == "fp8_block":
        tiles = [(m, max(n, 128), min(k, 128), warps, 4) for m, n, k, warps, _ in tiles]
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
    return tuple(Config(**dict(zip(names, tile, strict=True))) for tile in dict.fromkeys(tiles))


def codes_or_weights(weights: torch.Tensor) -> Pointer:
    """What stands in for weights while a product is compiled: of codes, their bytes."""
    dtype = torch.uint8 if weights.dtype in CODES else weights.dtype
    return Pointer(dtype, weights.data_ptr())


def _bytes_of_codes(weights: torch.Tensor) -> Any:
    return address(weights.view(torch.uint8) if weights.dtype in CODES else weights)


# ``address`` of weights or of their codes, which are read as bytes.
address_of_weights: Callable[[torch.Tensor], Any] = _bytes_of_codes if INTERPRETING else address


def scales_in_format(inputs: MoEInputs) -> tuple[Scales, Scales]:
    """Of both products. Raises CannotServe: codes that cannot be read two bytes at a time."""
    name, tensors = inputs.problem.weight_format, inputs.tensors
    made = []
    for codes, scale, halves in (
        (tensors.w1, tensors.gate_up_scale, inputs.activation.halves), (tensors.w2, tensors.down_scale, False)
    ):  # fmt: skip
        if codes.stride(2) != 1 or codes.data_ptr() % 2 or codes.stride(0) % 2 or codes.stride(1) % 2:
            raise CannotServe(f"weights have strides {codes.stride()}; it reads codes that follow each other, in pairs")
        assert name is not None
        assert scale is not None
        half = codes.shape[1] // 2
        own = name == "fp8_block" and halves and has_own_scales(codes.shape[1], scale.shape[1])
        of_expert, of_row, of_column = scale.stride()
        made.append(Scales(name, of_expert, of_row, of_column, -(-half // SIDE) * SIDE if own else half))
    return made[0], made[1]
