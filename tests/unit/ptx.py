"""Runs a block of PTX of inline assembly, as written, on tensors: the few instructions that kernels of ours have there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Registers = dict[str, torch.Tensor]  # int64, of 32 bits
_ALL = 0xFFFFFFFF


def run_block(text: str, given: list[torch.Tensor], dtypes: tuple[torch.dtype, ...], pack: int) -> list[torch.Tensor]:
    """The results, of the dtypes, of a block that takes and gives ``pack`` elements of each tensor, in registers of 32 bits."""
    shape = given[0].shape
    inputs = [one for tensor in given for one in _registers(tensor, pack)]
    outputs = sum(_count(dtype, pack) for dtype in dtypes)
    values: Registers = {f"${outputs + n}": one for n, one in enumerate(inputs)}
    passed: Any = None  # where a branch to the end is taken
    for operation, target, sources in _instructions(text):
        if operation is None:
            passed = values[target] != 0
        else:
            found = operation(*(values.get(one, one) for one in sources)) & _ALL
            values[target] = torch.where(passed, values[target], found) if passed is not None and target in values else found
    found, first = [], 0
    for dtype in dtypes:
        count = _count(dtype, pack)
        words = torch.stack(torch.broadcast_tensors(*(values[f"${first + n}"] for n in range(count))), -1)
        found.append(words.to(torch.uint32).view(dtype).reshape(shape))
        first += count
    return found


def _count(dtype: torch.dtype, pack: int) -> int:
    return pack if dtype.itemsize == 4 else pack * dtype.itemsize // 4


def _registers(tensor: torch.Tensor, pack: int) -> list[torch.Tensor]:
    words = tensor.as_subclass(torch.Tensor).contiguous().view(-1, pack).view(torch.uint32)
    return list((words.long() & _ALL).unbind(-1))


@cache
def _instructions(text: str) -> list[tuple[Callable[..., Any] | None, str, tuple[Any, ...]]]:
    """(operation, target, sources: names of registers, and numbers); of a branch to the end (no operation, its condition)."""
    found: list[tuple[Callable[..., Any] | None, str, tuple[Any, ...]]] = []
    for line in re.split(r";\s*", text.strip().strip("{}")):
        name, _, operands = line.strip().partition(" ")
        if name.startswith("@"):
            assert text.rstrip("}\n").endswith(f"{operands.split()[-1]}:"), "a branch goes to the end"
            found.append((None, name[1:], ()))
        elif name and not name.startswith(".reg") and not name.endswith(":"):
            target, *sources = (one.strip() for one in operands.split(","))
            numbers = (int(one, 0) if one[0] in "-0123456789" else one for one in sources)
            found.append((_OPERATIONS[name], target, tuple(numbers)))
    return found


def _select(a: Any, b: Any, c: Any, table: int) -> Any:
    """lop3: bit 4a + 2b + c of the table for each bit."""
    found = 0
    for n in range(8):
        if table >> n & 1:
            one, two, three = (value if n >> at & 1 else ~value for value, at in ((a, 2), (b, 1), (c, 0)))
            found = found | one & two & three
    return found


def _in_two(dtype: torch.dtype, of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is computed of two numbers of each register, and rounded once."""

    def compute(*given: Any) -> torch.Tensor:
        numbers = (torch.as_tensor(one).to(torch.uint32).contiguous().view(-1, 1).view(dtype).double() for one in given)
        return of(*numbers).to(dtype).view(torch.uint32).squeeze(-1).long()

    return compute


def _fp32(word: Any) -> torch.Tensor:
    return torch.as_tensor(word).to(torch.uint32).view(torch.float32)


def _to_bf16(high: Any, low: Any) -> torch.Tensor:
    """Two of fp32, each rounded to bf16, in a register."""
    one, two = (_fp32(word).bfloat16().view(torch.int16).long() & 0xFFFF for word in (high, low))
    return one << 16 | two


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: torch.tensor([a]),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _select,
    "mul.rn.bf16x2": _in_two(torch.bfloat16, torch.mul),
    "mul.rn.f16x2": _in_two(torch.float16, torch.mul),
    "fma.rn.bf16x2": _in_two(torch.bfloat16, lambda a, b, c: a * b + c),
    "fma.rn.f16x2": _in_two(torch.float16, lambda a, b, c: a * b + c),
    "cvt.rn.bf16x2.f32": _to_bf16,
    "sub.rn.f32": lambda a, b: (_fp32(a) - _fp32(b)).view(torch.uint32).long(),
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "sub.u32": lambda a, b: a - b,
    "max.u32": lambda a, b: a.clamp(min=b),
    "setp.lt.u32": lambda a, b: (a < b).long(),
    "setp.eq.u32": lambda a, b: (a == b).long(),
    "selp.b32": lambda a, b, condition: torch.where(condition != 0, a, b),
}
