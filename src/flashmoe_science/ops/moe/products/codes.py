"""Codes of weights as operands of tensor cores: bf16 or fp16 in registers, by place in the units that a thread reads.

e2m1 and e4m3 are bf16 with another bias: shifted to their places, and times 2^126 or 2^120, a code is its value, with numbers
below the least normal one too; e4m3 is fp16 times 2^8. An integer of int4 is exact, and its product with its scale is rounded
once to the dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # e4m3

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
_E4M3 = """{{
.reg .b32 u, m, big, none;
.reg .pred p;
mov.b32 big, {big};
mov.b32 none, 0x80008000;
shl.b32 u, $2, 8;
shl.b32 m, $2, {left};
and.b32 m, m, {rest};
lop3.b32 m, u, 0x80008000, m, 0xEA;
fma.rn.{dtype} $0, m, big, none;
shr.b32 m, $2, {right};
and.b32 m, m, {rest};
lop3.b32 m, $2, 0x80008000, m, 0xEA;
fma.rn.{dtype} $1, m, big, none;
and.b32 m, $2, 0x7F7F7F7F;
add.u32 m, m, 0x01010101;
and.b32 m, m, 0x80808080;
setp.ne.u32 p, m, 0;
@p mov.b32 $0, {nan};
}}"""
# Of two units in $4: the n-th integers of both in $n. 128 + n is bf16 whose lowest bits are n, as 1024 + n is fp16; less 8.
_INT4 = """{{
.reg .b32 m, one, less;
mov.b32 one, {one};
mov.b32 less, {less};
lop3.b32 m, $4, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} $0, m, one, less;
shr.b32 m, $4, 4;
lop3.b32 m, m, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} $1, m, one, less;
shr.b32 m, $4, 8;
lop3.b32 m, m, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} $2, m, one, less;
shr.b32 m, $4, 12;
lop3.b32 m, m, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} $3, m, one, less;
}}"""
_INT4_AS_BF16 = tl.constexpr(_INT4.format(dtype="bf16x2", one="0x3F803F80", high="0x43004300", less="0xC308C308"))
_INT4_AS_FP16 = tl.constexpr(_INT4.format(dtype="f16x2", one="0x3C003C00", high="0x64006400", less="0xE408E408"))
_E2M1_ASM = tl.constexpr(_E2M1)
_E4M3_AS_BF16 = tl.constexpr(
    _E4M3.format(dtype="bf16x2", big="0x7B807B80", left=4, right=4, rest="0x07F007F0", nan="0x7FC07FC0")
)
_E4M3_AS_FP16 = tl.constexpr(
    _E4M3.format(dtype="f16x2", big="0x5C005C00", left=7, right=1, rest="0x3F803F80", nan="0x7E007E00")
)


@triton.jit
def _as_fp32(bits):
    """fp32 of the bits of bf16."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def power(code):
    """fp32 of e8m0."""
    code = code.to(tl.int32)
    return _as_fp32(tl.where(code == 0, 0x40, tl.where(code == 255, 0x7FC0, code << 7)))


@triton.jit
def in_e4m3(values):
    """Values in e4m3's range, the nearest to those past it."""
    return tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def as_e4m3(values):
    """The e4m3 nearest to fp32 values, halves to even, the largest for greater ones; by additions alone, as not every GPU has
    an instruction for it."""
    values = in_e4m3(values)
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)  # of fp32 so large the last bit is the last of e4m3
    return (values + step) - step


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
def by_place(tile, UNIT: tl.constexpr):
    """[rows, columns] with the columns of each place in a unit together: the first of all units, then the second."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(tile, [ROWS, COLUMNS // UNIT, UNIT]), (0, 2, 1)), [ROWS, COLUMNS])


@triton.jit
def _of_units(one, UNITS: tl.constexpr):
    """[rows, UNITS] of what a row has one or more of."""
    ROWS: tl.constexpr = one.shape[0]
    GROUPS: tl.constexpr = one.shape[1]
    return tl.reshape(tl.broadcast_to(one[:, :, None], [ROWS, GROUPS, UNITS // GROUPS]), [ROWS, UNITS])


@triton.jit
def of_mxfp4(units, scale, EXACT: tl.constexpr, INTERPRET: tl.constexpr):
    """bf16 weights [BLOCK_N, BLOCK_K], by place, of units [BLOCK_N, BLOCK_K / 4] and scales [BLOCK_N, BLOCK_K / 32]."""
    ROWS: tl.constexpr = units.shape[0]
    UNITS: tl.constexpr = units.shape[1]
    scale = _of_units(scale, UNITS)
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
    return _four_by_place(w_0, w_1, w_2, w_3)


@triton.jit
def _four_by_place(w_0, w_1, w_2, w_3):
    every = tl.join(tl.join(w_0, w_2), tl.join(w_1, w_3))  # [BLOCK_N, BLOCK_K / 4, 2, 2]
    return tl.reshape(tl.permute(every, (0, 2, 3, 1)), [w_0.shape[0], 4 * w_0.shape[1]])


@triton.jit
def _times(w, scale, dtype: tl.constexpr):
    """Their product, rounded once."""
    if w.dtype == scale.dtype:
        return w * scale
    else:
        return (w.to(tl.float32) * scale.to(tl.float32)).to(dtype)


@triton.jit
def of_int4(units, scale, zero_point, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """bf16 or fp16 weights [BLOCK_N, BLOCK_K], by place, of units [BLOCK_N, BLOCK_K / 4] and a scale or more a row; as many
    zero points, from 0 to 15, or None."""
    UNITS: tl.constexpr = units.shape[1]
    scale = _of_units(scale, UNITS)
    if INTERPRET:  # it rounds fp32 to bf16 towards zero
        bits, scale = units.to(tl.int32), scale.to(tl.float32)
        w_0, w_1 = ((bits & 15) - 8).to(tl.float32), ((bits >> 4 & 15) - 8).to(tl.float32)
        w_2, w_3 = ((bits >> 8 & 15) - 8).to(tl.float32), ((bits >> 12 & 15) - 8).to(tl.float32)
    elif dtype == tl.float16:
        w_0, w_1, w_2, w_3 = tl.inline_asm_elementwise(
            _INT4_AS_FP16, "=&r,=&r,=&r,=r,r", [units], (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        w_0, w_1, w_2, w_3 = tl.inline_asm_elementwise(
            _INT4_AS_BF16, "=&r,=&r,=&r,=r,r", [units], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    if zero_point is not None:  # both less 8: their difference is exact
        zero = _of_units((zero_point - 8).to(w_0.dtype), UNITS)
        w_0, w_1, w_2, w_3 = w_0 - zero, w_1 - zero, w_2 - zero, w_3 - zero
    return _four_by_place(
        _times(w_0, scale, dtype), _times(w_1, scale, dtype), _times(w_2, scale, dtype), _times(w_3, scale, dtype)
    )  # fmt: skip


@triton.jit
def of_fp8(units, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """bf16 or fp16 codes [BLOCK_N, BLOCK_K], by place, of units [BLOCK_N, BLOCK_K / 2]."""
    if INTERPRET:
        w_0, w_1 = _of_e4m3(units, 0), _of_e4m3(units, 1)
    elif dtype == tl.float16:
        w_0, w_1 = tl.inline_asm_elementwise(
            _E4M3_AS_FP16, "=&r,=&r,r", [units], (tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    else:
        w_0, w_1 = tl.inline_asm_elementwise(
            _E4M3_AS_BF16, "=&r,=&r,r", [units], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )  # fmt: skip
    return tl.reshape(tl.permute(tl.join(w_0, w_1), (0, 2, 1)), [units.shape[0], 2 * units.shape[1]])
