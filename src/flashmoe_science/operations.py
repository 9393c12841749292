"""The one list of operations. Each is a folder whose modules have the same names; they are imported when first needed.

``problem`` parses the text form, ``kernels`` lists the implementations, ``contract`` is the contract of all of them. Judging
records needs only the first, without torch. A backward is in its forward's folder: the folder or module of that name in each
room.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashmoe_science.problem import CUSTOM, DistributedProblem, Problem, ProblemError, parse_custom

if TYPE_CHECKING:
    from flashmoe_science.contract import Contract
    from flashmoe_science.kernel import AnyKernel

TRITON_MISSING = None if importlib.util.find_spec("triton") else "Triton is not installed (it exists for Linux)"


def public(name: str) -> Any:
    """The public function named "module:function". Only the proof times it; no operation imports upwards."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: ``word`` begins the text of its problems, ``package`` is its folder as a dotted name, ``part`` its part of
    each room if it shares the folder. ``parallelism`` is the word of its distributed problems, cp or ep; empty if there are
    none."""

    name: str
    word: str
    package: str
    part: str = ""
    parallelism: str = ""

    def parse(self, text: str) -> Problem:
        """Read the text form of a problem. Raises ProblemError."""
        return self.module("problem").parse(text)

    def ours(self) -> tuple[AnyKernel, ...]:
        """Our kernels, the preferred first; none if Triton is missing: the framework's own operators serve every call."""
        return self.module("front", "kernels").ours()

    def peers(self) -> tuple[AnyKernel, ...]:
        """What a user would pick instead. Importing them imports no peer's package."""
        return self.module("front", "kernels").PEERS

    def kernels(self) -> tuple[AnyKernel, ...]:
        return (*self.ours(), *self.peers())

    def fallback(self) -> str:
        """The name of the peer that is the framework's own implementation."""
        return self.module("front", "kernels").FALLBACK

    def contract(self) -> Contract:
        """The contract of its kernels; for the proof only."""
        return self.module("proof", "contract").CONTRACT

    def module(self, room: str, name: str = "") -> Any:
        """The module of that name in one of its rooms; the room itself without one."""
        return import_module(".".join(filter(None, (self.package, room, self.part, name))))


OPERATIONS: tuple[Operation, ...] = (
    Operation("attention", "attn", "flashmoe_science.ops.attention", parallelism="cp"),
    Operation("attention_backward", "attnbwd", "flashmoe_science.ops.attention", "backward", parallelism="cp"),
    Operation("attention_merge", "attnmerge", "flashmoe_science.ops.attention", "merge"),
    Operation("moe", "moe", "flashmoe_science.ops.moe", parallelism="ep"),
    Operation("moe_backward", "moebwd", "flashmoe_science.ops.moe", "backward"),
)


def operation(name: str) -> Operation:
    """The operation of that name. Raises ValueError where there is none; the message lists the names."""
    for one in OPERATIONS:
        if one.name == name:
            return one
    raise ValueError(f"operation is {name!r}; it must be one of {', '.join(one.name for one in OPERATIONS)}")


def is_operation(name: str) -> bool:
    return any(one.name == name for one in OPERATIONS)


def first_words() -> tuple[str, ...]:
    """The words that a problem's text may begin with."""
    return (*(one.word for one in OPERATIONS), CUSTOM)


@lru_cache(maxsize=4096)
def parse_problem(text: str) -> Problem:
    """Read the text form of a problem of any operation. Raises ProblemError: a word is not understood, given twice or missing;
    the message gives the grammar."""
    word, *rest = text.split() or [""]
    for one in OPERATIONS:
        if one.word != word:
            continue
        ranks = re.fullmatch(f"{one.parallelism}([0-9]{{1,9}})", rest[-1]) if rest and one.parallelism else None
        return (
            one.parse(text)
            if ranks is None
            else DistributedProblem(one.parse(text[: text.rindex(rest[-1])]), one.parallelism, int(ranks[1]))
        )
    if word != CUSTOM:
        raise ProblemError(f"problem {text!r} does not begin with {', '.join(map(repr, first_words()))}")
    custom = parse_custom(text)
    if is_operation(custom.op):
        raise ProblemError(f"op is {custom.op!r}, which is an operation of the package; give it another name")
    return custom


def kernel_named(name: str, op: str | None = None) -> AnyKernel:
    """The kernel of that name, of operation ``op`` or of any. Raises TypeError: not a string. Raises ValueError: there is none;
    the message lists the names."""
    if not isinstance(name, str):
        raise TypeError(f"kernel is {name!r}; it must be a string or None")
    kernels = [kernel for one in OPERATIONS if op in (None, one.name) for kernel in one.kernels()]
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    hint = f" ({TRITON_MISSING})" if TRITON_MISSING else ""
    raise ValueError(f"kernel is {name!r}; it must be one of {', '.join(kernel.name for kernel in kernels)}{hint}")
