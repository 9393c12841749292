"""Finds what an assembler got wrong: uniform registers that Hopper's machine code reads on a path that has not written them.

In one arm of a branch ptxas 12.8 (Triton 3.6) wrote a descriptor of a wgmma that both arms read (docs/notes/backward.md): the
other multiplied whatever was there. A write under a predicate counts as one; a copy of what is unwritten is unwritten.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from triton import knobs

_LINE = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+ )?\s*(?P<text>[A-Z][^;]*?)\s*(?:\(\*(?P<note>.*)\*\))?\s*;"
)
_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"\.L\w+")
_WRITES = re.compile(r"(?:U(?!TMA|BLK|CGABAR|SETMAXREG)|R2UR|S2UR|P2UR|REDUX|VOTEU)\S* (?:U?P\w+, )?UR(\d+)\b")
_PREDICATES = re.compile(r"(?:UISETP|UPLOP3)\S* ")  # what they write is no register
_COPY = re.compile(r"UMOV UR(\d+), UR(\d+)$")
_KEPT = re.compile(r"(?:MOV|IMAD\.U32|IMAD\.MOV\.U32) R\d+, (?:RZ, RZ, )?UR\d+$")  # in a vector register, for later
_DESCRIPTOR = re.compile(r"GMMA\S* R\d+, (?P<register>R\d+, )?gdesc\[UR(?P<first>\d+)\]")


class _Instruction(NamedTuple):
    at: str
    text: str
    targets: list[str]
    ends: bool  # the next one follows only by a jump
    reads: set[int]
    writes: set[int]
    copy: tuple[int, int] | None


def unwritten(cubin: bytes) -> list[str]:
    """The instructions of a binary that may read a uniform register which nothing has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return unwritten_in(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def unwritten_in(listing: str) -> list[str]:
    """As ``unwritten``, of what nvdisasm prints."""
    code, labels = _parse(listing)
    unset: list[set[int] | None] = [None] * len(code)
    unset[0], left = set(range(63)), [0]
    while left:
        number = left.pop()
        after = _after(code[number], unset[number] or set())
        nexts = [labels[one] for one in code[number].targets if one in labels]
        for follower in nexts if code[number].ends else [number + 1, *nexts]:
            before = unset[follower]
            if before is None or not after <= before:
                unset[follower] = after | (before or set())
                left.append(follower)
    return [f"{one.at}: {one.text}" for one, registers in zip(code, unset, strict=True) if one.reads & (registers or set())]


def _after(one: _Instruction, unset: set[int]) -> set[int]:
    copied = {one.copy[0]} if one.copy and one.copy[1] in unset else set()
    return unset - one.writes | copied


def _parse(listing: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions, and the number of the one behind each label."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            text, guard = found["text"], found["guard"]
            name = text.split()[0].split(".")[0]
            jumps = name in ("BRA", "BRX", "CALL")
            always = guard is None and re.search(r"\bU?P\d", text) is None
            targets = _TARGET.findall(text + (found["note"] or "")) if jumps else []
            ends = name == "BRX" or (name in ("BRA", "EXIT", "RET") and always)
            code.append(_Instruction(found["at"], text, targets, ends, *_registers(text)))
    return code, labels


def _registers(text: str) -> tuple[set[int], set[int], tuple[int, int] | None]:
    """What an instruction reads, what it writes, and what it copies to where."""
    if copy := _COPY.match(text):
        return set(), {int(copy[1])}, (int(copy[1]), int(copy[2]))
    written = None if _PREDICATES.match(text) else _WRITES.match(text)
    first = int(written[1]) if written else 0
    wide = written is not None and re.search(r"\.(64|WIDE)\b", text.split()[0])
    writes = {first, first + 1} if wide else {first} if written else set()
    if _KEPT.match(text):
        return set(), writes, None
    rest = text[written.end() :] if written else text
    reads = {int(one) for one in re.findall(r"(?<!gdesc\[)\bUR(\d+)", rest)}
    if operands := _DESCRIPTOR.search(text):  # of the left operand, which may be in registers, and of the right one
        first = int(operands["first"])
        reads |= set(range(first + 2 if operands["register"] else first, first + 4))
    return reads, writes, None
