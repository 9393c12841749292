"""One attention forward. Text form: ``attn b2 h16 hk4 q4096 k4096 d128 bf16 causal``; features.py has windows and the like.

Defaults are left out: ``hk`` equals ``h``, ``k`` equals ``q``, ``dv`` equals ``d``, no mask, [B, H, S, D] in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar, get_args

from flashmoe_science.ops.attention.problem import features as features_of
from flashmoe_science.ops.attention.problem.features import PLAIN, Features
from flashmoe_science.ops.attention.problem.lengths import SequenceLengths, sequence_lengths, visible_keys, visible_pairs
from flashmoe_science.problem import (
    DTYPE_BYTES,
    Dtype,
    Problem,
    ProblemError,
    Series,
    Walk,
    check_extent,
    check_word,
    read_words,
    require,
    rounded_up,
)

Mask = Literal["full", "causal", "causal-topleft"]
Layout = Literal["bhsd", "bshd"]

MAX_HEAD_DIM = 256
KEY_CLASS = 64  # keys: our kernel for serving decides alike for numbers that round up to one multiple
_SIZES = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
_SIZE_WORDS = ("b", "h", "hk", "q", "k", "d", "dv")
_COMPARED_OTHERWISE = (*_SIZES, "dtype", "mask", "layout")  # a dtype by its width, a mask by whether it is causal
_FEW_QUERIES, _TALLEST = 16, 64  # queries of a head, and rows of a tile of them above which no choice differs
GRAMMAR = (
    "attn b<batch> h<heads> [hk<kv heads>] q<queries> [k<keys>] d<head_dim> [dv<value head_dim>] "
    f"[fp16|bf16|fp32] [causal|causal-topleft] [bshd] {features_of.GRAMMAR}"
)


@dataclass(frozen=True, slots=True)
class AttentionProblem(Problem):
    """One attention forward: softmax(Q K^T * scale + mask) V, exact.

    Q is [batch, heads, seqlen_q, head_dim], K is [batch, heads_kv, seqlen_k, head_dim] and V is
    [batch, heads_kv, seqlen_k, head_dim_v]; query head ``h`` reads key/value head ``h // (heads / heads_kv)``.

    ``mask`` is "full", "causal" (FlashAttention's, the last query sees the last key: bottom-right) or
    "causal-topleft" (PyTorch's ``is_causal``: query i sees keys 0 to i). The two agree where seqlen_q equals seqlen_k,
    and there the problem is normalised to "causal".

    ``layout`` is the order in memory: "bhsd" or "bshd". It decides strides, not the result.

    ``features`` are windows, biases, caches and the like; for ragged or packed sequences ``seqlen_q`` and ``seqlen_k`` are the
    longest lengths (``sequence_lengths`` has each). A window whose right is 0 is a causal mask, which makes any right
    redundant: the problem is normalised to "causal" without a right. Raises ProblemError: a size below 1, a head_dim above 256,
    heads not divisible by heads_kv, an unknown word, features that cannot be combined.
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
    features: Features = PLAIN

    op = "attention"

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"):
            check_extent(field, getattr(self, field))
        for field in ("head_dim", "head_dim_v"):
            check_extent(field, getattr(self, field), most=MAX_HEAD_DIM)
        if self.heads % self.heads_kv:
            raise ProblemError(f"heads is {self.heads} and heads_kv is {self.heads_kv}; heads_kv must divide heads")
        for field, allowed in (("dtype", Dtype), ("mask", Mask), ("layout", Layout)):
            check_word(field, getattr(self, field), get_args(allowed))
        if not isinstance(self.features, Features):
            raise ProblemError(f"features is {self.features!r}; it must be a Features")
        if self.features != PLAIN:
            self.features.check()
        if self.features.window_right == 0 and self.mask == "full":
            object.__setattr__(self, "mask", "causal")
        if self.features.window_right is not None and self.causal:
            object.__setattr__(self, "features", replace(self.features, window_right=None))
        self.features.check_problem(self.mask, self.seqlen_q == self.seqlen_k, self.dtype)
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

    def sequence_lengths(self) -> tuple[SequenceLengths, ...]:
        """The queries, the keys and the padding of each sequence, ``batch`` of them. They follow from the problem."""
        return sequence_lengths(self.features, self.batch, self.seqlen_q, self.seqlen_k)

    def scores(self) -> int:
        """Query-key pairs that the mask leaves, over all batches and query heads. A boolean mask's tensor hides none here."""
        return self.heads * _over_sequences(self, visible_pairs)

    def flops(self) -> int:
        """Multiplications and additions of the two matrix products, masked pairs not counted (exactly, not halved)."""
        return 2 * self.scores() * (self.head_dim + self.head_dim_v)

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: the inputs read once and the output written once."""
        return self.input_bytes() + self.queries() * self.heads * self.head_dim_v * DTYPE_BYTES[self.dtype]

    def input_bytes(self) -> int:
        """Bytes of Q, K, V and the visible part of a bias. Keys hidden by a window or padding are left out."""
        width, features = DTYPE_BYTES[self.dtype], self.features
        rows_k = self.batch * self.seqlen_k
        if features != PLAIN:
            rows_k = _over_sequences(self, visible_keys)
        of_kv = rows_k * self.heads_kv * (self.head_dim + self.head_dim_v) * (1 if features.fp8_cache else width)
        of_bias = {"boolean": self.scores() // self.heads, "additive": self.scores() // self.batch * width}
        return self.queries() * self.heads * self.head_dim * width + of_kv + of_bias.get(features.bias, 0)

    def queries(self) -> int:
        """Rows of queries, each counted once and not per head."""
        if self.features.lengths != "packed":
            return self.batch * self.seqlen_q
        return sum(one.queries for one in self.sequence_lengths())

    def exponentials(self) -> int:
        """Exponentials: one for each score."""
        return self.scores()

    def is_products(self) -> bool:
        return True

    def walk(self) -> Walk:
        """Each row of queries goes through all keys."""
        width = DTYPE_BYTES[self.dtype] * (self.head_dim + self.head_dim_v)
        return Walk(self.batch * self.heads * self.seqlen_q, self.seqlen_k, width)

    def series(self) -> Series | None:
        """Speed against the sequence length, for one batch or for one number of tokens."""
        if self.seqlen_q != self.seqlen_k:
            return None
        heads = f"{self.heads} heads" if self.heads > 1 else "1 head"
        if self.heads_kv != self.heads:
            heads += f" ({self.heads_kv} of keys)"
        dim = f"D {self.head_dim}" if self.head_dim == self.head_dim_v else f"D {self.head_dim} and {self.head_dim_v}"
        sizes = (f"batch {self.batch}", f"{self.queries()} tokens")
        layout = "" if self.layout == "bhsd" else self.layout
        features = (" ".join(self.features.words()),) if self.features != PLAIN else ()
        families = tuple((dim, self.dtype, self.mask, size, heads, layout, *features) for size in sizes)
        return Series("sequence length", self.seqlen_q, families)

    def traits(self) -> Mapping[str, str]:
        shared = self.heads // self.heads_kv
        return {
            "dtype": self.dtype,
            "head_dim": str(self.head_dim),
            "head_dim_v": "as head_dim" if self.head_dim_v == self.head_dim else str(self.head_dim_v),
            "mask": self.mask,
            "layout": self.layout,
            "batch": str(self.batch),
            "heads": "one" if self.heads == 1 else "several",
            "query heads a key head": "1" if shared == 1 else f"{shared}{' (all)' if self.heads_kv == 1 else ''}",
            "queries": str(self.seqlen_q),
            "keys": "as queries" if self.seqlen_k == self.seqlen_q else "more" if self.seqlen_k > self.seqlen_q else "fewer",
            **({} if self.features == PLAIN else {"features": " ".join(self.features.words())}),
        }

    def order(self) -> tuple[object, ...]:
        sizes = (self.head_dim, self.head_dim_v, self.seqlen_q, self.seqlen_k, self.batch, self.heads, self.heads_kv)
        return ("", self.dtype, self.mask, *sizes, *self.features.words())

    def tile_key(self) -> Hashable:
        return head_parts(self.head_dim), head_parts(self.head_dim_v), self.causal_offset == 0

    def _tile_rows(self) -> int:
        """Rows of a tile that holds the few queries of all heads that share a key head: lower tiles read keys again for each,
        taller ones are another kernel's. For many queries, the tallest."""
        queries = length_class(self.seqlen_q) if self.features == PLAIN else self.seqlen_q
        return tile_rows(queries * (self.heads // self.heads_kv) if queries <= _FEW_QUERIES else _TALLEST, _TALLEST)

    def distance(self, other: Problem) -> float:
        """Distance by the parallel work (batch times heads) and the two lengths; infinite where anything but sizes differs."""
        if type(other) is not type(self) or self.features != other.features:  # what most differ in, at once
            return math.inf
        if self._features() != other._features():
            return math.inf
        pairs = (
            (self.batch * self.heads, other.batch * other.heads),
            (self.seqlen_q, other.seqlen_q),
            (self.seqlen_k, other.seqlen_k),
        )
        return max(abs(math.log2(a / b)) for a, b in pairs)

    def _features(self) -> tuple[object, ...]:
        """All that is neither a size nor a memory order. A new field counts unless it is named here."""
        others = [getattr(self, name) for name in _compared_alike(type(self))]  # type: ignore[arg-type]  # a class has a hash
        return (DTYPE_BYTES[self.dtype], self.causal, self._tile_rows(), *others)

    def kind(self) -> Hashable:
        """All but batch, heads and lengths; how many query heads share a key head; and, under a causal mask, whether the
        lengths are equal, on which the kernel that PyTorch chooses depends."""
        kept = [getattr(self, one.name) for one in fields(self) if one.name not in _SIZES[:5]]
        return (*kept, self.heads // self.heads_kv, self.causal and self.seqlen_q != self.seqlen_k)

    def representative(self) -> AttentionProblem:
        """``rounded``; with features the problem itself: such calls have their own choices, except for growing caches."""
        return self.rounded() if self.features == PLAIN else self

    def rounded(self) -> AttentionProblem:
        """Batch and lengths rounded up, by less than a quarter; a length that fits a tile of 2^n keys still does. Under a
        causal mask unequal lengths stay unequal, since a kernel's tiles may depend on where the diagonal begins."""
        queries, keys = length_class(self.seqlen_q), length_class(self.seqlen_k)
        if self.causal and queries == keys:
            queries -= self.seqlen_q < self.seqlen_k
            keys -= self.seqlen_q > self.seqlen_k
        return replace(self, batch=rounded_up(self.batch), seqlen_q=queries, seqlen_k=keys)

    def without_layout(self) -> AttentionProblem:
        """The same work in the default memory order, as the dispatch table has it."""
        return replace(self, layout="bhsd")

    def __str__(self) -> str:
        sizes = {word: getattr(self, name) for word, name in zip(_SIZE_WORDS, _SIZES, strict=True)}
        defaults = {"hk": self.heads, "k": self.seqlen_q, "dv": self.head_dim}
        words = ["attn", *(f"{word}{size}" for word, size in sizes.items() if size != defaults.get(word)), self.dtype]
        if self.causal:
            words.append(self.mask)
        if self.layout != "bhsd":
            words.append(self.layout)
        return " ".join((*words, *self.features.words()))


def parse(text: str) -> AttentionProblem:
    """Read the text form, whose first word is ``attn``. Raises ProblemError."""
    return parse_as(AttentionProblem, text, GRAMMAR)


def parse_as(kind: type[P], text: str, grammar: str) -> P:
    """Read the text form of a problem of that class. Raises ProblemError."""
    flags = {"dtype": get_args(Dtype), "mask": get_args(Mask), "layout": get_args(Layout)}
    sizes, found = read_words(text, grammar, (*_SIZE_WORDS, *features_of.SIZES), flags | features_of.FLAGS)
    require(text, grammar, sizes, "bhqd")
    every = {"hk": sizes["h"], "k": sizes["q"], "dv": sizes["d"], **sizes}
    given: dict[str, Any] = {name: every[word] for name, word in zip(_SIZES, _SIZE_WORDS, strict=True)}
    given |= {name: found[name] for name in flags if name in found}
    return kind(**given, features=Features.read(sizes, found))


P = TypeVar("P", bound=AttentionProblem)


@lru_cache(maxsize=4096)  # a judged run asks for the same problem's scores and bytes some ten times
def _over_sequences(problem: AttentionProblem, count: Callable[[SequenceLengths, Features, bool, int], int]) -> int:
    """The sum of ``count`` over the sequences; equal ones are counted once and multiplied."""
    alike_ones: Mapping[SequenceLengths, int] = {SequenceLengths(problem.seqlen_q, problem.seqlen_k): problem.batch}
    if problem.features.lengths != "equal":
        alike_ones = Counter(problem.sequence_lengths())
    aligned = problem.mask != "causal-topleft"
    return sum(
        alike * count(one, problem.features, problem.causal, one.keys - one.queries if aligned else 0)
        for one, alike in alike_ones.items()
    )


@cache
def _compared_alike(problem: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(problem) if one.name not in _COMPARED_OTHERWISE)


def tile_rows(rows: int, most: int) -> int:
    """The rows of a tile that holds that many packed rows, or the most that a tile is made of."""
    return max(16, min(most, 1 << (rows - 1).bit_length()))


def length_class(length: int) -> int:
    """The length that stands for ``length``: one query or key, then 16 (the least tile), then ``rounded_up``."""
    return rounded_up(length) if length > 16 else 16 if length > 1 else length


def padded_head_dim(head_dim: int) -> int:
    """The width of a tile that holds a head: a power of two, and no less than a tensor core's 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def head_parts(head_dim: int) -> tuple[int, ...]:
    """Widths of the one or two tiles, powers of two of at least 16 with the least sum, that hold a head."""
    one = padded_head_dim(head_dim)
    rest = padded_head_dim(head_dim - one // 2)
    return (one // 2, rest) if one > 16 and rest < one // 2 else (one,)
