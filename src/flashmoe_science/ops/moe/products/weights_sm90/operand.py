"""Weights in a format as wgmma's operand A in registers, without moving data between threads: what a checkpoint's bytes become.

Four threads that share a row read 16 bytes of it each: of four bits K of 128, for each thread a group of 32 that may share a
scale; of fp8 K of 64. In the operand a thread has of each 16 K its 2q, 2q + 1, 2q + 8 and 2q + 9. So K is permuted inside a
stage, and the tokens' with it (``permute.py``). The bits of a weight's K, from the highest: q [4], the thread; then of four
bits c [2], the chunk of 64 that one product takes; b [2]; and of the eight codes of a 32-bit word u, j, t [2 each]. The operand
has them as c, b, j, t, q, u. Of fp8 they are q; w [4], the word; u, j. The operand has them as w, j, q, u.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.moe.products.e2m1 import as_bf16
from flashmoe_science.ops.moe.products.words import FP8_BY_BOTH, INT4_BY_BOTH

ROWS = gl.constexpr(256)  # of weights of a tile, of which a consumer has 128 or 64
STEP = gl.constexpr(128)  # K of the smallest unit of work: of a stage, or of two of fp8
BYTES_OF_STAGE = gl.constexpr(64)  # of a row
APART = gl.constexpr(32)  # tokens of a tile up to which warps multiply apart, by mma.sync
PAIR = gl.constexpr(2)  # steps that are the unit of work of other tiles
CHUNK = gl.constexpr(64)  # K of one product
QUADS = gl.constexpr(4)  # threads that share a row


@gluon.constexpr_function
def chunks_of(form: str) -> int:
    """That a stage has."""
    return 1 if form.startswith("fp8") else 2


@gluon.constexpr_function
def span_of(form: str) -> int:
    """K of a thread of a stage; a block of rows that the first product's epilogue stores has eight times as many."""
    return 16 if form.startswith("fp8") else 32


def _layout(rows: int, columns: int) -> gl.DistributedLinearLayout:
    """Of [rows, 4, columns] bytes: a thread has the columns of one q in each of its rows, those of wgmma's operand."""
    inside = [[0, 0, 1 << n] for n in range(columns.bit_length() - 1)] + [[8, 0, 0], [64, 0, 0]][: rows // 64]
    lanes, warps = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(inside, lanes, warps, [], [rows, 4, columns])


BYTES_128, BYTES_64 = gl.constexpr(_layout(128, 16)), gl.constexpr(_layout(64, 16))
CODES, CODES_64 = gl.constexpr(_layout(128, 8)), gl.constexpr(_layout(64, 8))  # of a chunk
OF_SCALES, OF_SCALES_64 = (gl.constexpr(gl.SliceLayout(2, one.value)) for one in (CODES, CODES_64))  # [rows, 4]

_WORD = as_bf16("mul.rn.bf16x2 {one}, x, {factor};\n")
# What a factor lacks of a scale above 2^1, and a NaN.
_REST = """
max.u32 x, {scale}, 128;
sub.u32 x, x, 1;
mul.lo.u32 x, x, 0x00800080;
setp.eq.u32 p, {scale}, 255;
selp.b32 x, 0x7FC07FC0, x, p;
mul.rn.bf16x2 {to[0]}, {to[0]}, x;
mul.rn.bf16x2 {to[1]}, {to[1]}, x;
mul.rn.bf16x2 {to[2]}, {to[2]}, x;
mul.rn.bf16x2 {to[3]}, {to[3]}, x;
"""


def _upcast(words: int) -> str:
    """The assembly of a thread's chunk, so many words of codes, two a row. Its operands: results, two weights each, words, and
    for each byte of them a factor and a scale. A branch goes past the second products, which hardly any weights need."""
    codes = 4 * words  # the first of these operands
    places = [
        {
            "to": [f"${half + 2 * word + n}" for half in (0, 2 * words) for n in (0, 1)],
            "codes": f"${codes + word}",
            "factor": f"${codes + words + 4 * word}",
            "scale": f"${codes + words + 4 * words + 4 * word}",
        }
        for word in range(words)
    ]
    products, rest = ("".join(text.format(**place) for place in places) for text in (_WORD, _REST))
    any_scale = "mov.b32 x, 0;\n" + "".join(f"or.b32 x, x, {place['scale']};\n" for place in places[::2])
    registers = ".reg .b32 even, odd, x, y;\n.reg .pred p;"
    return f"{{\n{registers}{products}{any_scale}setp.lt.u32 p, x, 128;\n@p bra DONE;{rest}DONE:\n}}"


def _operands(words: int) -> str:
    return ",".join(["=&r"] * (4 * words) + ["r"] * (9 * words))


_UPCAST, _OPERANDS = gl.constexpr(_upcast(8)), gl.constexpr(_operands(8))
_UPCAST_64, _OPERANDS_64 = gl.constexpr(_upcast(4)), gl.constexpr(_operands(4))


@gluon.jit
def factors(scales):
    """2^126 times each e8m0 scale as two bf16 in 32 bits; of scales above 2^1, 2^127."""
    return gl.minimum(scales, 128) * 0x00800080 + 0x3F003F00


@gluon.jit
def chunks(codes):
    """The two chunks [rows, 4, 8] of a stage's codes [rows, 4, 16]."""
    ROWS: gl.constexpr = codes.shape[0]
    layout: gl.constexpr = CODES if ROWS == 128 else CODES_64
    one, two = codes.reshape([ROWS, 4, 2, 8]).permute(0, 1, 3, 2).split()
    return gl.convert_layout(one, layout, assert_trivial=True), gl.convert_layout(two, layout, assert_trivial=True)


@gluon.jit
def _every_byte(value, codes):
    """[rows, 4, bytes] of numbers [rows, 4]."""
    layout: gl.constexpr = codes.type.layout
    value = gl.convert_layout(value, gl.SliceLayout(2, layout), assert_trivial=True)
    return gl.expand_dims(value, 2) + gl.zeros(codes.shape, gl.int32, layout)


@gluon.jit
def _of_mxfp4(codes, scales):
    ROWS: gl.constexpr = codes.shape[0]
    scales = _every_byte(scales, codes)
    assembly: gl.constexpr = _UPCAST if ROWS == 128 else _UPCAST_64
    operands: gl.constexpr = _OPERANDS if ROWS == 128 else _OPERANDS_64
    given = [codes, factors(scales), scales]
    return gl.inline_asm_elementwise(assembly, operands, given, (gl.bfloat16, gl.bfloat16), True, ROWS // 4)


@gluon.jit
def upcast(codes, given, FORMAT: gl.constexpr, operand: gl.constexpr):
    """bf16 [rows, CHUNK] of a chunk's codes and what ``scales.py`` gives of their scales, numbers [rows, 4]."""
    ROWS: gl.constexpr = codes.shape[0]
    if chunks_of(FORMAT) == 1:
        given = [codes, _every_byte(given[0], codes), _every_byte(given[1], codes)]
        weights = gl.inline_asm_elementwise(FP8_BY_BOTH[0], FP8_BY_BOTH[1], given, gl.bfloat16, True, 16)
        weights = weights.reshape([ROWS, 4, 4, 2, 2]).permute(0, 2, 3, 1, 4)  # [rows, q, w, j, u]
    else:
        if FORMAT == "mxfp4":
            x, y = _of_mxfp4(codes, given[0])
        else:
            given = [codes, _every_byte(given[0], codes), _every_byte(given[1], codes), _every_byte(given[2], codes)]
            x, y = gl.inline_asm_elementwise(INT4_BY_BOTH[0], INT4_BY_BOTH[1], given, (gl.bfloat16, gl.bfloat16), True, 8)
        weights = gl.join(x, y).reshape([ROWS, 4, 2, 2, 2, 2]).permute(0, 2, 5, 3, 1, 4)  # [rows, q, b, t, u, j]
    return gl.convert_layout(weights.reshape([ROWS, CHUNK]), operand, assert_trivial=True)
