"""One mixture-of-experts layer's experts. Text form: ``moe t4096 e64 k8 d1024 f2048 bf16``."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import get_args

from flashmoe_science.problem import (
    DTYPE_BYTES,
    Dtype,
    Problem,
    ProblemError,
    Series,
    check_dtype,
    check_extent,
    read_words,
    require,
    rounded_up,
)

GRAMMAR = "moe t<tokens> e<experts> k<experts a token> d<model dim> f<expert hidden dim> [fp16|bf16|fp32]"
_ROUTING_BYTES = 4 + 4  # of one (token, expert) pair: its fp32 weight and its int32 expert


@dataclass(frozen=True, slots=True)
class MoEProblem(Problem):
    """Gated experts: out[t] = sum over j of topk_weights[t, j] * W2[e] (silu(G x[t]) * (U x[t])), e = topk_ids[t, j].

    x and out are [tokens, dim]; w1 is [experts, 2 * hidden, dim], its first ``hidden`` rows G and the others U; w2 is
    [experts, dim, hidden]; topk_weights is [tokens, top_k] fp32 and topk_ids [tokens, top_k] int32, the ids of a token all
    different. The router is not part of it.

    The routing that is measured touches every expert that it can: ``experts``, or tokens * top_k where those are fewer.

    Raises:
        ProblemError: a size below 1, a top_k above experts, an unknown dtype.
    """

    tokens: int
    experts: int
    top_k: int
    dim: int
    hidden: int
    dtype: Dtype = "bf16"

    op = "moe"

    def __post_init__(self) -> None:
        for field in ("tokens", "experts", "top_k", "dim", "hidden"):
            check_extent(field, getattr(self, field))
        check_dtype(self.dtype)
        if self.top_k > self.experts:
            raise ProblemError(f"top_k is {self.top_k} and experts is {self.experts}; top_k must be at most experts")

    def pairs(self) -> int:
        """(token, expert) pairs: rows of the grouped matrix products."""
        return self.tokens * self.top_k

    def touched(self) -> int:
        """Experts whose weights are read."""
        return min(self.experts, self.pairs())

    def flops(self) -> int:
        """Multiplications and additions of the three matrix products of every pair."""
        return 2 * self.pairs() * 3 * self.dim * self.hidden

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: x, the touched experts' weights and the routing read, the output written."""
        elements = 2 * self.tokens * self.dim + self.touched() * 3 * self.dim * self.hidden
        return elements * DTYPE_BYTES[self.dtype] + self.pairs() * _ROUTING_BYTES

    def queries(self) -> int:
        return self.tokens

    def is_products(self) -> bool:
        return True

    def series(self) -> Series:
        """Speed against the number of tokens."""
        family = (f"{self.experts} experts, {self.top_k} a token", f"D {self.dim}, F {self.hidden}", self.dtype)
        return Series("tokens", self.tokens, (family,))

    def order(self) -> tuple[object, ...]:
        return (self.op, self.dtype, self.experts, self.top_k, self.dim, self.hidden, self.tokens)

    def tile_key(self) -> Hashable:
        """By the height of an expert's rows, in powers of two, and the sizes of a model."""
        height = round(math.log2(self.pairs() / self.touched()))
        return DTYPE_BYTES[self.dtype], self.dim, self.hidden, height

    def distance(self, other: Problem) -> float:
        """By every size. The dtypes must be as wide."""
        if not isinstance(other, MoEProblem) or DTYPE_BYTES[self.dtype] != DTYPE_BYTES[other.dtype]:
            return math.inf
        names = ("tokens", "experts", "top_k", "dim", "hidden")
        return max(abs(math.log2(getattr(self, name) / getattr(other, name))) for name in names)

    def representative(self) -> MoEProblem:
        """Tokens rounded up, by less than a quarter."""
        return replace(self, tokens=rounded_up(self.tokens))

    def __str__(self) -> str:
        return f"moe t{self.tokens} e{self.experts} k{self.top_k} d{self.dim} f{self.hidden} {self.dtype}"


def parse(text: str) -> MoEProblem:
    """Read the text form, whose first word is ``moe``. Raises ProblemError."""
    sizes, flags_found = read_words(text, GRAMMAR, "tekdf", {"dtype": get_args(Dtype)})
    require(text, GRAMMAR, sizes, "tekdf")
    return MoEProblem(
        tokens=sizes["t"],
        experts=sizes["e"],
        top_k=sizes["k"],
        dim=sizes["d"],
        hidden=sizes["f"],
        **flags_found,  # type: ignore[arg-type]  # just checked against its Literal
    )
