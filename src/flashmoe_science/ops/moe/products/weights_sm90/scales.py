"""Scales and zero points of a consumer's rows of weights: where they are, loaded a step early, and what an upcast is given."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.moe.products.weights_sm90.operand import PAIR, QUADS

# Of the constexpr SCALES of a product: the format; bytes of a scale, and whether those are fp16; bytes from an expert's to the
# next one's, from a row's and from a column's; columns; rows and K to a scale; rows from a gate's to its up's and in all, as
# scales count them; whether a thread loads two; bytes from zero points to those of the next expert, of the next eight rows, 0
# where there are none, and of the next column.
FORMAT, BYTES, FP16, OF_EXPERT, OF_ROW, OF_COLUMN, COLUMNS, HIGH, WIDE, UP, ALL, PAIRED = map(gl.constexpr, range(12))
ZEROS, ZEROS_OF_ROW, ZEROS_OF_COLUMN = map(gl.constexpr, range(12, 15))
_GROUP = gl.constexpr(32)  # of a thread: K to a scale, where a step has more than one

# Two of bf16 in 32 bits each: the number nearest to an fp32 one, and to what is left of it.
_PARTS = gl.constexpr("""{
.reg .b32 x;
cvt.rn.bf16x2.f32 $0, $2, $2;
shl.b32 x, $0, 16;
sub.rn.f32 x, $2, x;
cvt.rn.bf16x2.f32 $1, x, x;
}""")
_LESS_8 = gl.constexpr(0xC308C308 - 2**32)  # of 128 and a code


class Places(NamedTuple):
    """Of an expert's scales and zero points: bytes where those of each row begin, [rows, 1], and a row's place in a byte. Where
    there are no zero points, the last three are of no use."""

    scales: Any
    rows: Any
    zeros: Any
    rows_of_zeros: Any
    shift: Any


@gluon.jit
def quads_of(layout: gl.constexpr):
    """0 to 3, [1, 4], by an instruction that stays here: else what follows of them takes registers of all warps."""
    quads = gl.expand_dims(gl.arange(0, QUADS, gl.SliceLayout(0, layout)), 0)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [quads], gl.int32, False, 1)


@gluon.jit
def _read(pointers, BYTES: gl.constexpr):
    """Numbers as int32. A row's first brings the 128 bytes around it to L2. Of ``gl.load`` values would be packed in a
    register, which waits for them."""
    if BYTES == 1:
        return gl.inline_asm_elementwise("ld.global.L2::128B.u8 $0, [$1];", "=r,l", [pointers], gl.int32, True, 1)
    elif BYTES == 2:
        return gl.inline_asm_elementwise("ld.global.L2::128B.u16 $0, [$1];", "=r,l", [pointers], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("ld.global.L2::128B.u32 $0, [$1];", "=r,l", [pointers], gl.int32, True, 1)


@gluon.jit
def _column(quads, step, SCALES: gl.constexpr):
    """[1, 4] of a step. Past the end of a row others of it, for tokens that are 0."""
    if SCALES[WIDE] == _GROUP:
        return gl.minimum(step * QUADS + quads, SCALES[COLUMNS] - 1)
    else:
        return gl.minimum(step, SCALES[COLUMNS] - 1) + quads * 0


@gluon.jit
def load_scales(places, quads, step, SCALES: gl.constexpr):
    """The scales [rows, 4] of a step. ``PAIRED``: those of its pair, two of a row's eight to a thread."""
    SIZE: gl.constexpr = SCALES[BYTES]
    if SCALES[PAIRED]:
        column = gl.minimum(PAIR * (step // PAIR * QUADS + quads), SCALES[COLUMNS] - PAIR)
        return _read(places.scales + (places.rows + column), 2)
    else:
        return _read(places.scales + (places.rows + _column(quads, step, SCALES) * SCALES[OF_COLUMN]), SIZE)


@gluon.jit
def load_zeros(places, quads, step, SCALES: gl.constexpr):
    """The zero points [rows, 4] of a step, each in a byte of two rows."""
    return _read(places.zeros + (places.rows_of_zeros + _column(quads, step, SCALES) * SCALES[ZEROS_OF_COLUMN]), 1)


@gluon.jit
def _as_fp32(scale, SCALES: gl.constexpr):
    """The bits of a scale as those of fp32."""
    if SCALES[BYTES] == 4:
        return scale
    elif SCALES[BYTES] == 1:  # e8m0
        return gl.where(scale == 0, 0x400000, gl.where(scale == 255, 0x7FC00000, scale << 23))
    elif SCALES[FP16]:
        return scale.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
    else:
        return scale << 16


@gluon.jit
def given_of(loaded, zeros, places, quads, step, SCALES: gl.constexpr, layout: gl.constexpr):
    """What ``upcast`` is given for a step: of mxfp4 the scales, from the threads that have them if ``PAIRED``; of others both
    parts of a scale, of int4 after what is to be subtracted from 128 and a code."""
    if SCALES[FORMAT] == "mxfp4":
        if SCALES[PAIRED]:
            source = (step & 1) * 2 + quads // 2
            loaded = gl.gather(loaded, gl.zeros(loaded.shape, gl.int32, layout) + source, 1) >> quads % 2 * 8 & 255
        return (loaded,)
    else:
        scale = _as_fp32(loaded, SCALES)
        high, low = gl.inline_asm_elementwise(_PARTS, "=&r,=r,r", [scale], (gl.int32, gl.int32), True, 1)
        if SCALES[FORMAT] != "int4":
            return high, low
        elif SCALES[ZEROS_OF_ROW] == 0:
            return gl.full(loaded.shape, _LESS_8, gl.int32, layout), high, low
        else:
            return ((zeros >> places.shift & 15) + 0xC300) * 0x00010001, high, low
