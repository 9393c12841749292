"""Finds mbarriers whose memory is plain memory too, and which no one has invalidated: PTX leaves undefined what is there then.

Triton gives the memory of a barrier that no one waits for to others (docs/notes/shared-gpu.md). Those that it makes itself, for
Blackwell, it invalidates.
"""

from __future__ import annotations

import re

_PLAIN = re.compile(r"\b(?:ld|st)\.shared\.(?:v(\d)\.)?b(\d+)\s[^\n\[]*\[\s*(?:global_smem|(%r\d+))(?:\s*\+\s*(\d+))?\s*\]")


def reused(ptx: str) -> set[int]:
    """Where in shared memory such a barrier of a program lies."""
    bases = set(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx))
    at = {to: int(offset) for to, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if base in bases}
    at |= dict.fromkeys(bases, 0)
    made, ended = (
        {at[one] for one in re.findall(rf"mbarrier\.{what}\.shared::cta\.b64 \[(%r\d+)\]", ptx) if one in at}
        for what in ("init", "inval")
    )
    plain: set[int] = set()
    for many, bits, register, offset in _PLAIN.findall(ptx):
        if register in at or not register:
            first = at.get(register, 0) + int(offset or 0)
            plain |= set(range(first, first + int(many or 1) * int(bits) // 8))
    return {one for one in made - ended if plain & set(range(one, one + 8))}
