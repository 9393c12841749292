"""Runs a block of PTX of inline assembly, as written, on tensors: the few instructions that kernels of ours have there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Registers = dict[str, torch.Tensor]  # int32 [n, 1], what a program takes as unsigned too; bool of predicates
_SIGN = -(2**31)  # with its bit turned, signed numbers compare as unsigned ones do


def run_block(text: str, given: list[torch.Tensor], dtypes: tuple[torch.dtype, ...], pack: int) -> list[torch.Tensor]:
    """The results, of the dtypes, of a block that takes and gives ``pack`` elements of each tensor, in registers of 32 bits."""
    shape = given[0].shape
    inputs = [one for tensor in given for one in _registers(tensor, pack)]
    outputs = sum(_count(dtype, pack) for dtype in dtypes)
    values: Registers = {f"${outputs + n}": one for n, one in enumerate(inputs)}
    passed: Any = None  # where a branch to the end is taken
    for operation, target, sources in _instructions(text):
        if operation is None:
            passed = values[target]
            if passed.all():
                break
        else:
            found = operation(*(values.get(one, one) for one in sources))
            values[target] = torch.where(passed, values[target], found) if passed is not None and target in values else found
    found, first = [], 0
    for dtype in dtypes:
        count = _count(dtype, pack)
        words = torch.cat(torch.broadcast_tensors(*(values[f"${first + n}"] for n in range(count))), -1)
        found.append(words.view(dtype).reshape(shape))
        first += count
    return found


def _count(dtype: torch.dtype, pack: int) -> int:
    return pack if dtype.itemsize == 4 else pack * dtype.itemsize // 4


def _registers(tensor: torch.Tensor, pack: int) -> list[torch.Tensor]:
    words = tensor.contiguous().view(-1, pack).view(torch.int32)
    return list(words.mT.unsqueeze(-1).contiguous().unbind())


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
            numbers = (_signed(int(one, 0)) if one[0] in "-0123456789" else one for one in sources)
            found.append((_OPERATIONS[name], target, tuple(numbers)))
    return found


@cache
def _register(number: int) -> torch.Tensor:
    return torch.tensor([[number]], dtype=torch.int32)


def _signed(number: int) -> int:
    """The number of 32 bits as int32 has it."""
    return (number - _SIGN) % 2**32 + _SIGN


@cache
def _lop3(table: int) -> Callable[..., Any]:
    """Of three registers, for each bit, bit 4a + 2b + c of the table."""
    return eval(f"lambda a, b, c: {_selected('abc', table)}")


def _selected(names: str, table: int) -> str:
    """What a = 0 gives, turned where a = 1 gives another."""
    if not names:
        return str(-table)  # all bits, or none
    half = 1 << len(names) - 1
    low = table % 2**half
    turned, others = _selected(names[1:], low ^ table >> half), _selected(names[1:], low)
    turned = turned if turned == "0" else names[0] if turned == "-1" else f"({names[0]} & {turned})"
    if turned == "0":
        return others
    return {"0": turned, "-1": f"~{turned}"}.get(others, f"({turned} ^ {others})")


def _two(word: Any, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of each register, in fp64. A register keeps them: scales and constants are read several times."""
    word = word if isinstance(word, torch.Tensor) else _register(word)
    found = getattr(word, "two", None)
    if found is None or found[0] is not dtype:
        found = word.two = dtype, word.view(dtype).double()
    return found[1]


def _in_two(dtype: torch.dtype, of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is computed of two numbers of each register, and rounded once."""
    return lambda *given: of(*[_two(one, dtype) for one in given]).to(dtype).view(torch.int32)


def _to_bf16(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Two of fp32, each rounded to bf16, in a register."""
    return torch.cat((low, high), -1).view(torch.float32).bfloat16().view(torch.int32)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": _register,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b & _signed(0xFFFFFFFF >> b),
    "lop3.b32": lambda a, b, c, table: _lop3(table)(a, b, c),
    "mul.rn.bf16x2": _in_two(torch.bfloat16, torch.mul),
    "mul.rn.f16x2": _in_two(torch.float16, torch.mul),
    "fma.rn.bf16x2": _in_two(torch.bfloat16, lambda a, b, c: a * b + c),
    "fma.rn.f16x2": _in_two(torch.float16, lambda a, b, c: a * b + c),
    "cvt.rn.bf16x2.f32": _to_bf16,
    "sub.rn.f32": lambda a, b: (a.view(torch.float32) - b.view(torch.float32)).view(torch.int32),
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "sub.u32": lambda a, b: a - b,
    "max.u32": lambda a, b: (a ^ _SIGN).clamp(min=b ^ _SIGN) ^ _SIGN,
    "setp.lt.u32": lambda a, b: (a ^ _SIGN) < (b ^ _SIGN),
    "setp.eq.u32": lambda a, b: a == b,
    "selp.b32": lambda a, b, condition: torch.where(condition, a, b),
}
