"""One merge of attention to parts of the keys. Text form: ``attnmerge p4 t4096 h32 d128 bf16``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from flashmoe_science.problem import (
    DTYPE_BYTES,
    Dtype,
    Problem,
    Series,
    check_dtype,
    check_extent,
    read_words,
    require,
    rounded_up,
)

WORD = "attnmerge"
GRAMMAR = f"{WORD} p<parts of the keys> t<tokens> h<heads> d<head dim> [fp16|bf16|fp32]"
_SIZES = ("p", "t", "h", "d")


@dataclass(frozen=True, slots=True)
class AttentionMergeProblem(Problem):
    """out = sum over parts of exp(lse_p - lse) out_p, lse = log(sum over parts of exp(lse_p)).

    Parts' outputs are [parts, tokens, heads, head_dim], their log-sum-exps fp32 [parts, heads, tokens], -inf where a row has
    none of the part's keys. Raises ProblemError: a size below 1, an unknown dtype.
    """

    parts: int
    tokens: int
    heads: int
    head_dim: int
    dtype: Dtype = "bf16"

    op = "attention_merge"

    def __post_init__(self) -> None:
        for field in ("parts", "tokens", "heads", "head_dim"):
            check_extent(field, getattr(self, field))
        check_dtype(self.dtype)

    def rows(self) -> int:
        return self.tokens * self.heads

    def flops(self) -> int:
        return 2 * self.parts * self.rows() * self.head_dim

    def exponentials(self) -> int:
        return self.parts * self.rows()

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: every part read once, the result written once."""
        return (self.parts + 1) * self.rows() * (self.head_dim * DTYPE_BYTES[self.dtype] + 4)

    def input_bytes(self) -> int:
        return self.min_bytes() * self.parts // (self.parts + 1)

    def queries(self) -> int:
        return self.tokens

    def series(self) -> Series:
        """Speed against the number of tokens."""
        return Series("tokens", self.tokens, ((f"{self.parts} parts", f"{self.heads} heads of {self.head_dim}", self.dtype),))

    def order(self) -> tuple[object, ...]:
        return (self.op, self.dtype, self.head_dim, self.heads, self.parts, self.tokens)

    def distance(self, other: Problem) -> float:
        """The largest log2 of a ratio of sizes."""
        if type(other) is not type(self) or DTYPE_BYTES[self.dtype] != DTYPE_BYTES[other.dtype]:
            return math.inf
        names = ("parts", "tokens", "heads", "head_dim")
        return max(abs(math.log2(getattr(self, name) / getattr(other, name))) for name in names)

    def representative(self) -> Self:
        """Tokens change from call to call."""
        return type(self)(self.parts, rounded_up(self.tokens), self.heads, self.head_dim, self.dtype)

    def __str__(self) -> str:
        return f"{WORD} p{self.parts} t{self.tokens} h{self.heads} d{self.head_dim} {self.dtype}"


def parse(text: str) -> AttentionMergeProblem:
    """Read the text form. Raises ProblemError."""
    sizes, flags = read_words(text, GRAMMAR, _SIZES, {"dtype": tuple(DTYPE_BYTES)})
    require(text, GRAMMAR, sizes, _SIZES)
    parts, tokens, heads, head_dim = (sizes[one] for one in _SIZES)
    dtype = flags.get("dtype", "bf16")
    return AttentionMergeProblem(parts, tokens, heads, head_dim, dtype)  # type: ignore[arg-type]  # of its Literal
