"""What an attention call may ask for beyond softmax(Q K^T * scale) V: windows, caps, sinks, biases, ragged lengths, pages.

``Features`` says which, without tensors: it is part of an AttentionProblem and decides what a kernel is built for. The memory
layout of keys and values follows from it (call/tensors.py has the tensors):

- lengths "equal": K and V are [batch, heads_kv, seqlen_k, head_dim] views, all sequences of one length;
- lengths "ragged": as many queries in each sequence, keys in a cache: [caches, heads_kv, capacity, head_dim] views and
  ``cache_seqlens``; with pages [pages, heads_kv, page, head_dim] views and a ``page_table``;
- lengths "packed": queries of all sequences one after another, a [1, heads, total_q, head_dim] view with ``cu_seqlens_q``;
  keys the same with ``cu_seqlens_k``, or paged as above with ``cache_seqlens``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from flashmoe_science.problem import Dtype, ProblemError, check_extent, check_word

Lengths = Literal["equal", "ragged", "packed"]
Bias = Literal["none", "alibi", "boolean", "additive"]

_BIAS_WORDS: dict[str, Bias] = {"alibi": "alibi", "boolmask": "boolean", "bias": "additive"}
# The words of a problem's text form: sizes, each a name and a number, and flags by the field that they give.
SIZES = ("left", "right", "softcap", "prefix", "page")
FLAGS: dict[str, Collection[str]] = {
    "sinks": ("sinks",),
    "bias": tuple(_BIAS_WORDS),
    "lengths": ("ragged", "packed"),
    "leftpad": ("leftpad",),
    "fp8_cache": ("fp8kv",),
}
GRAMMAR = (
    "[left<keys>] [right<keys>] [softcap<n>] [sinks] [alibi|boolmask|bias] [prefix<keys>] [ragged|packed] [page<rows>] "
    "[leftpad] [fp8kv]"
)
# What a kernel can be asked for on top of plain attention, in words (``Features.kinds``).
KINDS: dict[str, str] = {
    "window": "a sliding window",
    "softcap": "a soft cap",
    "sinks": "attention sinks",
    "alibi": "ALiBi",
    "boolmask": "a boolean mask",
    "bias": "an additive bias",
    "prefix": "a prefix that every query sees",
    "ragged": "a key-value cache of ragged lengths",
    "packed": "packed sequences",
    "page": "a paged cache",
    "leftpad": "left padding",
    "fp8kv": "fp8 keys and values",
}


@dataclass(frozen=True, slots=True)
class Features:
    """Which features a problem has; the default has none.

    window_left, window_right: query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right,
        both included (FlashAttention's meaning); None for no limit. A causal mask has a right of 0 by itself.
    softcap: scores s become cap * tanh(s / cap) before the mask; 0 for none. A call's own value may be a fraction.
    sinks: each query head has a learned logit in the softmax, without a value.
    bias: "alibi" adds -slope * |i + seqlen_k - seqlen_q - j|; "boolean" hides where False; "additive" adds a tensor.
    prefix: under a causal mask, keys before this one are seen by every query of their sequence, whatever the window.
    lengths: see the module.
    page: rows of a page of the key-value cache; 0 for a contiguous one.
    leftpad: the first valid key of each cached sequence is given; keys still count from the first.
    fp8_cache: K and V are e4m3 with a scale for each sequence and key head.
    """

    window_left: int | None = None
    window_right: int | None = None
    softcap: int = 0
    sinks: bool = False
    bias: Bias = "none"
    prefix: int = 0
    lengths: Lengths = "equal"
    page: int = 0
    leftpad: bool = False
    fp8_cache: bool = False

    def check(self) -> None:
        """Raise ProblemError unless the values are possible together. (Not at construction, which a compiler traces.)"""
        for field in ("window_left", "window_right"):
            if getattr(self, field) is not None:
                check_extent(field, getattr(self, field), least=0)
        for field in ("softcap", "prefix", "page"):
            check_extent(field, getattr(self, field), least=0)
        check_word("bias", self.bias, get_args(Bias))
        check_word("lengths", self.lengths, get_args(Lengths))
        for field in ("sinks", "leftpad", "fp8_cache"):
            if not isinstance(getattr(self, field), bool):
                raise ProblemError(f"{field} is {getattr(self, field)!r}; it must be True or False")
        self._check_together()

    def _check_together(self) -> None:
        cached = self.lengths == "ragged" or (self.lengths == "packed" and self.page > 0)
        for wrong, words in (
            (self.page and self.lengths == "equal", f"page is {self.page} and lengths equal; pages need ragged or packed"),
            (self.leftpad and not cached, "leftpad is of a cache; it needs ragged, or packed with pages"),
            (self.bias in ("boolean", "additive") and self.lengths == "packed",
             f"bias is {self.bias} and lengths packed; a tensor over queries and keys needs sequences of one shape"),
        ):  # fmt: skip
            if wrong:
                raise ProblemError(words)

    def check_problem(self, mask: str, square: bool, dtype: Dtype) -> None:
        """Raise ProblemError unless a problem of that mask, with as many keys as queries if ``square``, can have them."""
        aligned = self.window or self.bias == "alibi" or self.lengths != "equal"
        if mask == "causal-topleft" and aligned and (self.lengths == "ragged" or not square):
            words = "windows, ALiBi, ragged and packed sequences are aligned bottom-right"
            raise ProblemError(f"mask is 'causal-topleft' with {' '.join(self.words())}; {words}")
        if self.prefix and mask == "full":
            raise ProblemError(f"prefix is {self.prefix} and mask is 'full', which hides nothing; it needs a causal mask")
        if self.fp8_cache and dtype == "fp32":
            raise ProblemError("fp8_cache is True and dtype is 'fp32'; beside e4m3 keys and values it must be fp16 or bf16")

    @property
    def window(self) -> bool:
        return self.window_left is not None or self.window_right is not None

    def kinds(self) -> tuple[str, ...]:
        """Which of KINDS are asked for."""
        asked = {
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "prefix": self.prefix,
            "page": self.page,
            "leftpad": self.leftpad,
            "fp8kv": self.fp8_cache,
        }
        return tuple(kind for kind in KINDS if asked.get(kind) or kind == self.lengths or _BIAS_WORDS.get(kind) == self.bias)

    def words(self) -> tuple[str, ...]:
        """The words of the text form, none for the default."""
        window = (("left", self.window_left), ("right", self.window_right))
        sizes = {"softcap": self.softcap, "prefix": self.prefix, "page": self.page}
        return (
            *(f"{side}{keys}" for side, keys in window if keys is not None),
            *(f"{kind}{sizes.get(kind, '')}" for kind in self.kinds() if kind != "window"),
        )

    @classmethod
    def read(cls, sizes: Mapping[str, int], flags: Mapping[str, str]) -> Self:
        """The features of words that ``problem.read_words`` found. Raises ProblemError."""
        for name in ("softcap", "prefix", "page"):
            if name in sizes:
                check_extent(name, sizes[name])
        return cls(
            window_left=sizes.get("left"),
            window_right=sizes.get("right"),
            softcap=sizes.get("softcap", 0),
            sinks="sinks" in flags,
            bias=_BIAS_WORDS[flags["bias"]] if "bias" in flags else "none",
            prefix=sizes.get("prefix", 0),
            lengths=flags.get("lengths", "equal"),  # type: ignore[arg-type]  # one of FLAGS
            page=sizes.get("page", 0),
            leftpad="leftpad" in flags,
            fp8_cache="fp8_cache" in flags,
        )


PLAIN = Features()


def unsupported(features: Features, served: Collection[str] = (), who: str = "it") -> str | None:
    """Why ``who`` does not serve a problem of these features, in words; None if all its kinds are in ``served``."""
    missing = [KINDS[kind] for kind in features.kinds() if kind not in served]
    return f"{who} does not serve {', '.join(missing)}" if missing else None
