"""One mixture-of-experts layer. Text form: ``moe t4096 e64 k8 d1024 f2048 bf16``; with ``logits`` it has its router.

gpt-oss's experts are ``moe t4096 e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed``, and as its checkpoint has them
``moe t4096 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Self, TypeVar, get_args

from flashmoe_science.formats import FORMATS, WeightFormat
from flashmoe_science.problem import (
    DTYPE_BYTES,
    Dtype,
    Problem,
    ProblemError,
    Series,
    check_dtype,
    check_extent,
    check_word,
    read_words,
    require,
    rounded_up,
)

Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"]
# ids: the call is given the experts of each token and their weights. logits, zipf: it starts from router logits.
Routing = Literal["ids", "logits", "zipf"]

_FUNCTIONS: dict[str, Function] = {one.removesuffix("_silu"): one for one in get_args(Function)}  # by their words
_FLAGS = ("bias", "ungated", "interleaved", "transposed")
_FORMAT_WORDS = tuple(f"w:{one}" for one in FORMATS)
GRAMMAR = (
    "moe t<tokens> e<experts> k<experts a token> d<model dim> f<expert hidden dim> [fp16|bf16|fp32] "
    f"[{'|'.join(_FORMAT_WORDS)}] [bias] "
    f"[{'|'.join(_FUNCTIONS)}] [ungated] [interleaved] [transposed] [ids|logits|zipf]"
)
_ROUTING_BYTES = 4 + 4  # of one (token, expert) pair: its fp32 weight and its int32 expert
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MoEProblem(Problem):
    """Experts: out[t] = sum over j of weights[t, j] * (W2[e] (act(G x[t]) * (U x[t]))), e = ids[t, j].

    x and out are [tokens, dim]; w1 is [experts, 2 * hidden, dim], its first ``hidden`` rows G and the others U; w2 is
    [experts, dim, hidden]. What differs from that:

    - ``activation``: act, silu by default. "clamped_silu" is gpt-oss's: the gate at most 7, the up projection within 7 of 0,
      then (up + 1) * gate * sigmoid(1.702 * gate); a call may have other numbers.
    - ``bias``: gate_up_bias [experts, 2 * hidden] is added to the first product, down_bias [experts, dim] to the second.
    - not ``gated``: w1 is [experts, hidden, dim] and an expert is W2[e] act(G x[t]).
    - ``interleaved``: rows of G and of U alternate in w1.
    - ``transposed``: w1 or w2 is [experts, in, out] in memory.
    - ``weight_format``: w1 and w2 are in one of ``formats.FORMATS``, with scales; x, biases and out stay of the dtype.

    ``routing``, what a call starts from:

    - "ids": weights [tokens, top_k] fp32 and ids [tokens, top_k] int32, the ids of a token all different. The measured routing
    touches as many experts as possible: ``experts``, or tokens * top_k if fewer. - "logits": router logits [tokens, experts]
    fp32. The ids of a token are those of its ``top_k`` largest logits, the lowest among equals; its weights are the softmax
    over them (the softmax over all experts, renormalised). Routing is uniform
      at random, and an expert that no token chose is not touched.
    - "zipf": the same, skewed: the expert of rank r is chosen in proportion to 1 / r.

    ``top_k`` may exceed ``experts`` only if some ids are of other ranks' experts; the text form has no such problem. Raises
    ProblemError: a size below 1, an unknown dtype, activation, routing or format, ``interleaved`` without a gate, weights in a
    format that are ``transposed``, or rows that no groups of one scale divide.
    """

    tokens: int
    experts: int
    top_k: int
    dim: int
    hidden: int
    dtype: Dtype = "bf16"
    routing: Routing = "ids"
    activation: Function = "silu"
    bias: bool = False
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    weight_format: WeightFormat | None = None

    op = "moe"

    def __post_init__(self) -> None:
        for field in ("tokens", "experts", "top_k", "dim", "hidden"):
            check_extent(field, getattr(self, field))
        check_dtype(self.dtype)
        check_word("routing", self.routing, get_args(Routing))
        check_word("activation", self.activation, get_args(Function))
        if self.interleaved and not self.gated:
            raise ProblemError("interleaved is True and gated is False; only gates and ups can alternate")
        if self.weight_format is not None:
            self._check_format(self.weight_format)

    def _check_format(self, name: str) -> None:
        check_word("weight_format", name, FORMATS)
        if self.transposed:
            raise ProblemError(f"transposed is True and weight_format is {name!r}; scales are along the rows of [out, in]")
        group = FORMATS[name].group
        for field, size in (("dim", self.dim), ("hidden", self.hidden)):
            if group and size % group:
                raise ProblemError(f"{field} is {size} and weight_format is {name!r}; it must be a multiple of {group}")

    def words(self) -> tuple[str, ...]:
        """The words of the text form for all that differs from SwiGLU without biases in the default layout."""
        words = (
            f"w:{self.weight_format}" if self.weight_format else "",
            "bias" if self.bias else "",
            self.activation.removesuffix("_silu") if self.activation != "silu" else "",
            "" if self.gated else "ungated",
            "interleaved" if self.interleaved else "",
            "transposed" if self.transposed else "",
        )
        return tuple(filter(None, words))

    def rows_of_w1(self) -> int:
        """Rows of w1, which are the columns of the pre-activations."""
        return self.hidden * (2 if self.gated else 1)

    def pairs(self) -> int:
        """(token, expert) pairs: rows of the grouped matrix products."""
        return self.tokens * self.top_k

    def from_ids(self) -> Self:
        """The same problem, starting from ids."""
        return self if self.routing == "ids" else replace(self, routing="ids")

    def touched(self) -> int:
        """Experts whose weights are read. From logits the expected number of distinct ones, rounded: the problem has no
        tensors, and the number changes with the seed."""
        if self.routing == "ids":
            return min(self.experts, self.pairs())
        chances = _chances(self.experts, self.top_k, self.routing == "zipf")
        return round(sum(1 - (1 - chance) ** self.tokens for chance in chances))

    def rows_per_expert(self) -> float:
        """Rows an expert, on average, if as many experts as possible are touched: about the rows of a tile. Ids and logits give
        the same number, so that both get the same tiles."""
        return self.pairs() / min(self.experts, self.pairs())

    def flops(self) -> int:
        """Multiplications and additions of the matrix products of every pair: three, or two without a gate."""
        return 2 * self.pairs() * self.weights()

    def weights(self) -> int:
        """Elements of one expert's matrices."""
        return (3 if self.gated else 2) * self.dim * self.hidden

    def biases(self) -> int:
        """Elements of one expert's biases."""
        return (self.rows_of_w1() + self.dim) * self.bias

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: x, the touched experts' weights and biases and the routing (ids and weights, or
        logits) read, the output written."""
        elements = 2 * self.tokens * self.dim + self.touched() * self.biases()
        return elements * DTYPE_BYTES[self.dtype] + self.touched() * self.weight_bytes() + self.routing_bytes()

    def weight_bytes(self) -> int:
        """Bytes of one expert's matrices and their scales."""
        if self.weight_format is None:
            return self.weights() * DTYPE_BYTES[self.dtype]
        form = FORMATS[self.weight_format]
        return form.bytes(self.rows_of_w1(), self.dim) + form.bytes(self.dim, self.hidden)

    def routing_bytes(self) -> int:
        """Bytes that the routing is read from."""
        return self.pairs() * _ROUTING_BYTES if self.routing == "ids" else self.tokens * self.experts * _LOGIT_BYTES

    def queries(self) -> int:
        return self.tokens

    def is_products(self) -> bool:
        return True

    def series(self) -> Series:
        """Speed against the number of tokens."""
        starts = {"ids": (), "logits": ("from logits",), "zipf": ("from skewed logits",)}[self.routing]
        family = (f"{self.experts} experts, {self.top_k} a token", f"D {self.dim}, F {self.hidden}", self.dtype)
        return Series("tokens", self.tokens, ((*family, *self.words(), *starts),))

    def order(self) -> tuple[object, ...]:
        routing = get_args(Routing).index(self.routing)
        sizes = (self.experts, self.top_k, self.dim, self.hidden)
        return (self.op, self.dtype, *sizes, routing, " ".join(self.words()), self.tokens)

    def tile_key(self) -> Hashable:
        """The rows of an expert in powers of two, the sizes of a model and the layout of its weights; for quantised weights
        also whether there is only one token, for which some kernels have configs of their own."""
        layout = self.gated, self.interleaved, self.transposed, self.weight_format, self.weight_format and self.tokens == 1
        return DTYPE_BYTES[self.dtype], self.dim, self.hidden, round(math.log2(self.rows_per_expert())), *layout

    def distance(self, other: Problem) -> float:
        """The largest log2 of a ratio of sizes, whatever the routing, activation and layout: kernels refuse what they do not
        support. The dtypes must be as wide, and the weights of one format."""
        if type(other) is not type(self) or DTYPE_BYTES[self.dtype] != DTYPE_BYTES[other.dtype]:
            return math.inf
        if self.weight_format != other.weight_format:
            return math.inf
        names = ("tokens", "experts", "top_k", "dim", "hidden")
        return max(abs(math.log2(getattr(self, name) / getattr(other, name))) for name in names)

    def representative(self) -> Self:
        """The problem with its tokens rounded up, by less than a quarter."""
        return replace(self, tokens=rounded_up(self.tokens))

    def without_layout(self) -> Self:
        """The problem starting from ids: the choice of a kernel depends on the layout of weights, and not on the routing."""
        return self.from_ids()

    def __str__(self) -> str:
        sizes = f"moe t{self.tokens} e{self.experts} k{self.top_k} d{self.dim} f{self.hidden}"
        routing = () if self.routing == "ids" else (self.routing,)
        return " ".join((sizes, self.dtype, *self.words(), *routing))


P = TypeVar("P", bound=MoEProblem)


@lru_cache(maxsize=256)
def _chances(experts: int, top_k: int, skewed: bool) -> tuple[float, ...]:
    """The chance of each expert to be among the ``top_k`` of one token.

    Skewed by Zipf's law: experts arrive at rates of 1 / rank, and the first ``top_k`` are chosen. At the time when ``top_k``
    have arrived on average, an expert has with chance 1 - exp(-rate * time); those chances sum to ``top_k``.
    """
    if not skewed or top_k == experts:
        return (top_k / experts,) * experts

    def arrived(time: float) -> list[float]:
        return [-math.expm1(-time / rank) for rank in range(1, experts + 1)]

    low, high = 0.0, 1.0
    while sum(arrived(high)) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(arrived(middle)) < top_k else (low, middle)
    return tuple(arrived(high))


def parse(text: str) -> MoEProblem:
    """Read the text form, whose first word is ``moe``. Raises ProblemError, also for a ``top_k`` above ``experts``."""
    return parse_as(MoEProblem, text, GRAMMAR)


def parse_as(kind: type[P], text: str, grammar: str) -> P:
    """Read the text form of an operation whose problems have these fields. Raises ProblemError, as ``parse``."""
    flags = {"dtype": get_args(Dtype), "routing": get_args(Routing), "activation": tuple(_FUNCTIONS), "format": _FORMAT_WORDS}
    sizes, found = read_words(text, grammar, "tekdf", flags | {word: (word,) for word in _FLAGS})
    require(text, grammar, sizes, "tekdf")
    if sizes["k"] > sizes["e"]:
        raise ProblemError(f"top_k is {sizes['k']} and experts is {sizes['e']}; top_k must be at most experts")
    return kind(
        tokens=sizes["t"],
        experts=sizes["e"],
        top_k=sizes["k"],
        dim=sizes["d"],
        hidden=sizes["f"],
        activation=_FUNCTIONS[found.get("activation", "silu")],
        bias="bias" in found,
        gated="ungated" not in found,
        interleaved="interleaved" in found,
        transposed="transposed" in found,
        weight_format=found["format"].removeprefix("w:") if "format" in found else None,  # type: ignore[arg-type]  # of its Literal
        **{field: found[field] for field in ("dtype", "routing") if field in found},  # type: ignore[arg-type]  # of its Literal
    )
