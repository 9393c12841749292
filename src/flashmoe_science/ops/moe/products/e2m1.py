"""Assembly that puts the codes of a word, eight weights of e2m1, where bf16 has their bits: two weights to a register.

Of a code s e e m the sign goes to bit 15 and e e m to bits 8 to 6, which is the code times 2^-126 in bf16, and a subnormal
number for 0.5. Two codes 16 bits apart are shifted at once.
"""

from __future__ import annotations

_SIGNS = """
and.b32 even, {codes}, 0x08080808;
and.b32 odd, {codes}, 0x80808080;
"""
# Of the n-th and the n + 4-th code each.
_PLACED = (
    """shl.b32 x, {codes}, 6;
shl.b32 y, even, 12;
lop3.b32 x, x, y, 0x01C001C0, 0xE4;
""",
    """shl.b32 x, {codes}, 2;
shl.b32 y, odd, 8;
lop3.b32 x, x, y, 0x01C001C0, 0xE4;
""",
    """shr.u32 x, {codes}, 2;
shl.b32 y, even, 4;
lop3.b32 x, x, y, 0x01C001C0, 0xE4;
""",
    """shr.u32 x, {codes}, 6;
lop3.b32 x, x, odd, 0x01C001C0, 0xE4;
""",
)


def as_bf16(times: str) -> str:
    """The text for a word ``{codes}``, whose four results are ``{to[0]}`` to ``{to[3]}``. ``times``: the instruction that
    multiplies x, two codes times 2^-126, by 2^126 and whatever else, into ``{one}`` of the results. The registers even, odd, x
    and y must be declared."""
    return _SIGNS + "".join(placed + times.replace("{one}", f"{{to[{n}]}}") for n, placed in enumerate(_PLACED))
