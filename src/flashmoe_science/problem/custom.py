"""An operation of a user's own. Text form: ``op row_softmax rows4096 cols1024 fp16 flops16777216 bytes16777216``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from flashmoe_science.problem.words import Dtype, ProblemError, check_dtype, check_extent, check_word, read_words, require

GRAMMAR = "op <name> <size><n> ... fp16|bf16|fp32 flops<n> bytes<n>"
_OP = re.compile(r"[a-z][a-z0-9_]*")
_SIZE_NAME = re.compile(r"[a-z][a-z_]*")
_OURS = ("attention", "moe")
_RESERVED = ("flops", "bytes", "fp", "bf")
_MOST_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class CustomProblem:
    """One call of an operation that a contract defines: named sizes, a dtype, and what the contract says it costs.

    ``sizes`` are (name, integer) pairs in the order in which they are written; ``problem["rows"]`` looks one up.

    Raises:
        ProblemError: a name that is not lower case words, is ours or is reserved; a size below 1; a size given twice.
    """

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: Dtype
    flop_count: int
    byte_count: int

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or not _OP.fullmatch(self.op) or self.op in _OURS:
            raise ProblemError(
                f"op is {self.op!r}; it must be lower case letters, digits and _, a letter first, and not {' or '.join(_OURS)}"
            )
        for name, value in self.sizes:
            if not isinstance(name, str) or not _SIZE_NAME.fullmatch(name) or name in _RESERVED:
                allowed = f"lower case letters and _, and not {', '.join(_RESERVED)}"
                raise ProblemError(f"a size of {self.op} is named {name!r}; it must be {allowed}")
            check_extent(name, value)
        if len(dict(self.sizes)) != len(self.sizes):
            raise ProblemError(f"{self.op} gives a size twice: {', '.join(name for name, _ in self.sizes)}")
        check_dtype(self.dtype)
        check_extent("flops", self.flop_count, least=0, most=_MOST_COUNT)
        check_extent("bytes", self.byte_count, least=0, most=_MOST_COUNT)

    def __getitem__(self, name: str) -> int:
        """The size of that name. Raises ProblemError where there is none."""
        sizes = dict(self.sizes)
        check_word(f"a size of {self.op}", name, sizes)
        return sizes[name]

    def flops(self) -> int:
        return self.flop_count

    def min_bytes(self) -> int:
        return self.byte_count

    def queries(self) -> None:
        """Nothing is known of what a query would be."""

    def without_layout(self) -> CustomProblem:
        return self

    def __str__(self) -> str:
        sizes = [f"{name}{value}" for name, value in self.sizes]
        return " ".join(["op", self.op, *sizes, self.dtype, f"flops{self.flop_count}", f"bytes{self.byte_count}"])


def parse_custom(text: str) -> CustomProblem:
    """Read the text form, whose first word is ``op``. Raises ProblemError."""
    _, *rest = text.split()
    if not rest:
        raise ProblemError(f"problem {text!r} names no operation; write: {GRAMMAR}")
    sizes, said = read_words(" ".join(rest), GRAMMAR, None, {"dtype": get_args(Dtype)})
    require(text, GRAMMAR, sizes, ("flops", "bytes"))
    if "dtype" not in said:
        raise ProblemError(f"problem {text!r} lacks a dtype; write: {GRAMMAR}")
    flops, moved = sizes.pop("flops"), sizes.pop("bytes")
    return CustomProblem(rest[0], tuple(sizes.items()), said["dtype"], flops, moved)  # type: ignore[arg-type]
