"""What is to be computed: shapes, dtypes and flags of one call, with its cost. Knows nothing of torch.

A problem has a short text form that the command line prints and parses, and that records store::

    attn b2 h16 hk4 q4096 k4096 d128 bf16 causal

Defaults are left out: ``hk`` equals ``h``, ``k`` equals ``q``, ``dv`` equals ``d``, no mask, [B, H, S, D] in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

Dtype = Literal["fp16", "bf16", "fp32"]
Mask = Literal["full", "causal", "causal-topleft"]
Layout = Literal["bhsd", "bshd"]

DTYPE_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_HEAD_DIM = 256
_MAX_EXTENT = 2**31 - 1  # a size that a kernel's 32-bit row counter can hold


class ProblemError(ValueError):
    """A problem that cannot exist, said in one line: the field, what it was and what is allowed."""


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention forward: softmax(Q K^T * scale + mask) V, exact.

    Q is [batch, heads, seqlen_q, head_dim], K is [batch, heads_kv, seqlen_k, head_dim] and V is
    [batch, heads_kv, seqlen_k, head_dim_v]; query head ``h`` reads key/value head ``h // (heads / heads_kv)``.

    ``mask`` is "full", "causal" (FlashAttention's, the last query sees the last key: bottom-right) or
    "causal-topleft" (PyTorch's ``is_causal``: query i sees keys 0 to i). The two agree where seqlen_q equals seqlen_k,
    and there the problem is normalised to "causal".

    ``layout`` is the order in memory: "bhsd" or "bshd". It decides strides, not the result.

    Raises:
        ProblemError: a size below 1, a head_dim above 256, heads not divisible by heads_kv, an unknown word.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: Dtype = "bf16"
    mask: Mask = "full"
    layout: Layout = "bhsd"

    op = "attention"

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_EXTENT:
                raise ProblemError(f"{field} is {value!r}; it must be an integer from 1 to {_MAX_EXTENT}")
        for field in ("head_dim", "head_dim_v"):
            if getattr(self, field) > MAX_HEAD_DIM:
                raise ProblemError(f"{field} is {getattr(self, field)}; it must be from 1 to {MAX_HEAD_DIM}")
        if self.heads % self.heads_kv:
            raise ProblemError(f"heads is {self.heads} and heads_kv is {self.heads_kv}; heads_kv must divide heads")
        for field, allowed in (("dtype", Dtype), ("mask", Mask), ("layout", Layout)):
            if getattr(self, field) not in get_args(allowed):
                raise ProblemError(f"{field} is {getattr(self, field)!r}; it must be one of {', '.join(get_args(allowed))}")
        if self.mask == "causal-topleft" and self.seqlen_q == self.seqlen_k:
            object.__setattr__(self, "mask", "causal")

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + causal_offset (when causal)."""
        return self.seqlen_k - self.seqlen_q if self.mask == "causal" else 0

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def scores(self) -> int:
        """Query-key pairs that the mask leaves, over all batches and query heads."""
        return self.batch * self.heads * _visible_pairs(self.seqlen_q, self.seqlen_k, self.causal, self.causal_offset)

    def flops(self) -> int:
        """Multiplications and additions of the two matrix products, masked pairs not counted (exactly, not halved)."""
        return 2 * self.scores() * (self.head_dim + self.head_dim_v)

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: Q, K, V read once and the output written once."""
        rows_q, rows_k = self.batch * self.heads * self.seqlen_q, self.batch * self.heads_kv * self.seqlen_k
        elements = rows_q * (self.head_dim + self.head_dim_v) + rows_k * (self.head_dim + self.head_dim_v)
        return elements * DTYPE_BYTES[self.dtype]

    def with_layout(self, layout: Layout) -> AttentionProblem:
        return replace(self, layout=layout)

    def __str__(self) -> str:
        words = ["attn", f"b{self.batch}", f"h{self.heads}"]
        if self.heads_kv != self.heads:
            words.append(f"hk{self.heads_kv}")
        words.append(f"q{self.seqlen_q}")
        if self.seqlen_k != self.seqlen_q:
            words.append(f"k{self.seqlen_k}")
        words.append(f"d{self.head_dim}")
        if self.head_dim_v != self.head_dim:
            words.append(f"dv{self.head_dim_v}")
        words.append(self.dtype)
        if self.causal:
            words.append(self.mask)
        if self.layout != "bhsd":
            words.append(self.layout)
        return " ".join(words)


Problem = AttentionProblem  # a union, once MoEProblem exists

GRAMMAR = (
    "attn b<batch> h<heads> [hk<kv heads>] q<queries> [k<keys>] d<head_dim> [dv<value head_dim>] "
    "[fp16|bf16|fp32] [causal|causal-topleft] [bshd]"
)
_SIZE = re.compile(r"(hk|dv|[bhqkd])([0-9]+)")


def _visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, offset: int) -> int:
    if not causal:
        return seqlen_q * seqlen_k
    # Row i sees i + offset + 1 keys between the row that sees its first key and the row that sees them all.
    first = max(0, -offset)
    last = min(seqlen_q, seqlen_k - offset)
    return (first + last + 1 + 2 * offset) * (last - first) // 2 + (seqlen_q - last) * seqlen_k


def parse_problem(text: str) -> Problem:
    """Read the text form of a problem.

    Raises:
        ProblemError: a word is not understood, stands twice or is missing; the message gives the grammar.
    """
    words = text.split()
    if not words or words[0] != "attn":
        raise ProblemError(f"problem {text!r} does not begin with 'attn'; write: {GRAMMAR}")
    sizes: dict[str, int] = {}
    flags: dict[str, str] = {}
    for word in words[1:]:
        size = _SIZE.fullmatch(word)
        if size:
            key = size[1]
            if key in sizes:
                raise ProblemError(f"problem {text!r} gives {key!r} twice")
            sizes[key] = int(size[2])
            continue
        for field, allowed in (("dtype", Dtype), ("mask", Mask), ("layout", Layout)):
            if word in get_args(allowed):
                if field in flags:
                    raise ProblemError(f"problem {text!r} gives the {field} twice ({flags[field]!r} and {word!r})")
                flags[field] = word
                break
        else:
            raise ProblemError(f"problem {text!r} has the unknown word {word!r}; write: {GRAMMAR}")
    missing = [key for key in "bhqd" if key not in sizes]
    if missing:
        raise ProblemError(f"problem {text!r} lacks {', '.join(f'{key}<n>' for key in missing)}; write: {GRAMMAR}")
    return AttentionProblem(
        batch=sizes["b"],
        heads=sizes["h"],
        heads_kv=sizes.get("hk", sizes["h"]),
        seqlen_q=sizes["q"],
        seqlen_k=sizes.get("k", sizes["q"]),
        head_dim=sizes["d"],
        head_dim_v=sizes.get("dv", sizes["d"]),
        **flags,  # type: ignore[arg-type]  # each value was just checked against its Literal
    )
