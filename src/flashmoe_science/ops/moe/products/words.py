"""Assembly that makes 8 or 16 bytes of codes, words that a thread has of one row, bf16 or fp16: two weights to a register.

The weights of a register are half a word apart: of four bits the n-th and the n + 4-th of a word, of fp8 the n-th and the
n + 2-th. So each takes a shift, and no weight goes to another thread.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental.gluon import language as gl

from flashmoe_science.ops.moe.products.e2m1 import as_bf16

BYTES = gl.constexpr(16)

_E2M1 = as_bf16("fma.rn.bf16x2 {one}, x, {given[0]}, none;\n")  # 2^126 and the scale together
# What a factor lacks of a scale above 2^1, and a NaN: a branch goes past it, which hardly any weights need.
_REST_OF_SCALE = """
setp.lt.u32 p, {given[1]}, 129;
@p bra DONE;
sub.u32 x, {given[1]}, 1;
mul.lo.u32 x, x, 0x00800080;
setp.eq.u32 p, {given[1]}, 255;
selp.b32 x, 0x7FC07FC0, x, p;
"""
_TIMES = "fma.rn.{dtype} {one}, {one}, {by}, none;\n"  # sm_80 has no product of two bf16 alone
# By a scale of two parts, its nearest bf16 and what is left of it: rounded as the product with 16 bits of the scale.
_TIMES_BOTH = """mul.rn.bf16x2 x, {one}, {by[1]};
fma.rn.bf16x2 {one}, {one}, {by[0]}, x;
"""
# 128 + n is bf16 whose lowest bits are n, as 1024 + n is fp16; less that much and the zero point.
_INT4 = """
lop3.b32 x, {codes}, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} {to[0]}, x, one, {given[0]};
shr.u32 x, {codes}, 4;
lop3.b32 x, x, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} {to[1]}, x, one, {given[0]};
shr.u32 x, {codes}, 8;
lop3.b32 x, x, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} {to[2]}, x, one, {given[0]};
shr.u32 x, {codes}, 12;
lop3.b32 x, x, 0x000F000F, {high}, 0xEA;
fma.rn.{dtype} {to[3]}, x, one, {given[0]};
"""
# Times 2^120 in bf16, 2^8 in fp16. A code that is no number makes its row's sum none, wherever it is in the 16 bytes.
_E4M3 = """
and.b32 odd, {codes}, 0x80808080;
shl.b32 x, {codes}, {left};
shl.b32 y, odd, 8;
lop3.b32 x, x, y, {rest}, 0xE4;
fma.rn.{dtype} {to[0]}, x, one, none;
shr.u32 x, {codes}, {right};
lop3.b32 x, x, odd, {rest}, 0xE4;
fma.rn.{dtype} {to[1]}, x, one, none;
and.b32 x, {codes}, 0x7F7F7F7F;
add.u32 x, x, 0x01010101;
or.b32 even, even, x;
"""
_NO_NUMBER = """
and.b32 even, even, 0x80808080;
setp.eq.u32 p, even, 0;
selp.b32 {first}, {first}, {nan}, p;
"""
_BEGIN = ".reg .b32 even, odd, x, y, one, none;\n.reg .pred p;\nmov.b32 even, 0;\nmov.b32 none, 0x80008000;\n"


class Upcast(NamedTuple):
    """Inline assembly, and its constraints."""

    text: str
    operands: str


def _block(body: str, after: str, results: int, given: int, one: str = "0", words: int = 4) -> Upcast:
    """``body`` once a word, of so many results of two weights each, then ``after``. Each of the numbers that are ``given``
    comes once a byte, and is the same for all."""
    of_given = [f"${words * (results + 1) + 4 * words * n}" for n in range(given)]
    half = 2 * words  # registers of a result
    text = "".join(
        body.format(
            codes=f"${words * results + word}",
            to=[f"${half * (n // 2) + 2 * word + n % 2}" for n in range(results)],
            given=of_given,
        )
        for word in range(words)
    )
    begin = f"{_BEGIN}mov.b32 one, {one};\n"
    text = f"{{\n{begin}{text}{after.format(given=of_given, first='$0')}}}"
    operands = ["=&r"] * (words * results) + ["r"] * (words + 4 * words * given)
    return Upcast(text, ",".join(operands))


def _every(registers: int, dtype: str, by: str) -> str:
    """All results times a register."""
    return "".join(_TIMES.format(dtype=dtype, one=f"${n}", by=by) for n in range(registers))


def _every_by_both(registers: int, first: int) -> str:
    """All results times the scale of which the parts are ``given`` from the ``first`` on."""
    by = [f"{{given[{first + n}]}}" for n in (0, 1)]
    return "".join(_TIMES_BOTH.format(one=f"${n}", by=by) for n in range(registers))


def _partly(text: str, **words: str) -> str:
    """The text with these words put in, and what ``_block`` puts in later as it is."""
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    return text


def _of(dtype: str) -> dict[str, Upcast]:
    """By format, of weights as bf16 or fp16."""
    bf16 = dtype == "bf16x2"
    if bf16:
        int4 = {"high": "0x43004300", "one": "0x3F803F80"}
        fp8 = {"one": "0x7B807B80", "left": "4", "right": "4", "rest": "0x07F007F0"}
        nan = "0x7FC07FC0"
    else:
        int4 = {"high": "0x64006400", "one": "0x3C003C00"}
        fp8 = {"one": "0x5C005C00", "left": "7", "right": "1", "rest": "0x3F803F80"}
        nan = "0x7E007E00"
    found = {
        "int4": _block(_partly(_INT4, dtype=dtype, **int4), "", 4, 1, int4["one"]),
        "int4 scaled": _block(_partly(_INT4, dtype=dtype, **int4), _every(16, dtype, "{given[1]}"), 4, 2, int4["one"]),
        "fp8": _block(_partly(_E4M3, dtype=dtype, **fp8), _partly(_NO_NUMBER, nan=nan), 2, 0, fp8["one"]),
    }
    if bf16:
        by_both = _partly(_INT4, dtype=dtype, **int4), _every_by_both(8, first=1), 4, 3, int4["one"]
        found["int4 by both"] = _block(*by_both, words=2)
        after = _partly(_NO_NUMBER, nan=nan) + _every_by_both(8, first=0)
        found["fp8 by both"] = _block(_partly(_E4M3, dtype=dtype, **fp8), after, 2, 2, fp8["one"])
        found["mxfp4"] = _block(_E2M1, f"{_REST_OF_SCALE}{_every(16, dtype, 'x')}DONE:\n", 4, 2)
    return found


_BF16, _FP16 = _of("bf16x2"), _of("f16x2")
MXFP4 = gl.constexpr(tuple(_BF16["mxfp4"]))
INT4_AS_BF16, INT4_AS_FP16 = gl.constexpr(tuple(_BF16["int4"])), gl.constexpr(tuple(_FP16["int4"]))
INT4_SCALED_AS_BF16 = gl.constexpr(tuple(_BF16["int4 scaled"]))
INT4_SCALED_AS_FP16 = gl.constexpr(tuple(_FP16["int4 scaled"]))
FP8_AS_BF16, FP8_AS_FP16 = gl.constexpr(tuple(_BF16["fp8"])), gl.constexpr(tuple(_FP16["fp8"]))
# Of 8 bytes and of 16, times a scale of two parts.
INT4_BY_BOTH, FP8_BY_BOTH = gl.constexpr(tuple(_BF16["int4 by both"])), gl.constexpr(tuple(_BF16["fp8 by both"]))
