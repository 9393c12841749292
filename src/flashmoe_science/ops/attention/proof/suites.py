"""Named lists of attention problems. ``documents`` are short sequences: the configurations that this project was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, cycle, product
from random import Random

from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.attention.proof import suites_serving

_TOKENS = 16384  # of a `long` problem, over all batches
_WIDTH = 2048  # heads times head_dim of a `long` problem
_SWEEP = (64, 65, 128, 192, 256, 512)
_SCALING = ((4, 1, 128), (1, 4, 128), (4, 4, 128), (8, 4, 128), (8, 8, 128), (1, 8, 128), (32, 8, 128), (32, 8, 256),
            (2, 8, 512), (1, 8, 2048), (4, 8, 2048))  # fmt: skip
_BF16 = ((1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256))
_CAUSAL = ((1, 1, 64), (1, 1, 128), (1, 1, 512), (8, 4, 128), (32, 8, 256), (4, 8, 2048))

SMOKE, SMOKE_CPU = "attn b1 h2 q64 d64 fp16", "attn b1 h2 q64 d64 fp32"
BUILD = ("attn b4 h16 q4096 d128 bf16 causal", "attn b8 h4 q128 d64 fp16", "attn b4 h8 q4096 d256 bf16")
# What any attention kernel serves: no shared heads, equal lengths and head dimensions, the usual layout.
COMMON = ("attn b1 h1 q128 d64 fp16", "attn b32 h8 q256 d64 fp16", "attn b2 h8 q512 d64 bf16 causal",
          "attn b4 h16 q4096 d128 bf16", "attn b4 h16 q4096 d128 bf16 causal")  # fmt: skip
COMMON_CPU = ("attn b1 h1 q64 d64 fp32", "attn b1 h4 q128 d64 fp32", "attn b2 h8 q256 d64 fp32 causal",
              "attn b1 h8 q512 d64 fp32 causal", "attn b1 h4 q256 d64 bf16")  # fmt: skip

_SMALL = (
    "attn b1 h1 q4 d4",
    "attn b1 h2 q65 d64 causal",
    "attn b2 h4 hk2 q33 k70 d40 dv24 causal",
    "attn b1 h2 q70 k33 d32 causal",
    "attn b1 h2 q70 k33 d32 causal-topleft",
    "attn b1 h3 hk1 q1 k200 d128",
    "attn b1 h2 q100 k130 d96 bshd",
    "attn b1 h1 q70 d192 causal",
    "attn b2 h1 q1 d1",
    "attn b1 h1 q40 k300 d80",
)
_DTYPES = ("fp16", "bf16", "fp32")


def small() -> tuple[str, ...]:
    """Odd and tiny shapes, every mask, grouped heads, rows that see no key, each in every dtype; then every mode."""
    return (*(f"{shape} {dtype}" for shape in _SMALL for dtype in _DTYPES), *suites_serving.small())


_WIDE = ((128, "", "bf16"), (128, "", "fp32"), (128, " causal", "bf16"), (256, "", "fp16"), (256, " causal", "fp16"))
_SWEPT = (
    # Every dtype, the plainest first.
    *(f"b2 h2 q65 d64{mask} {dtype}" for mask in ("", " causal") for dtype in _DTYPES),
    # Head dimensions, and others for values.
    *(f"b1 h2 q70 d{dim}" for dim in (1, 2, 8, 16, 24, 32, 40, 80, 96, 100, 128, 160, 192, 256)),
    "b1 h2 q70 d128 causal",
    "b1 h2 q70 d256 causal",
    # The widths that models have, in the dtypes that the turns above leave out.
    *(f"b1 h2 q70 d{dim}{mask} {dtype}" for dim, mask, dtype in _WIDE),
    *(f"b1 h2 q70 d{dim}" for dim in (48, 72, 112)),
    "b1 h2 q70 d64 dv32",
    "b1 h2 q70 d40 dv24 causal",
    "b1 h2 q70 d192 dv128 causal",
    # Batches and shared heads.
    "b3 h2 q33 d64 causal",
    "b3 h1 q70 d32",
    "b2 h8 hk1 q40 d64",
    "b2 h8 hk2 q40 d64 causal",
    "b1 h6 hk3 q70 d32",
    "b1 h6 hk2 q1 k70 d64",
    "b1 h10 hk2 q33 k40 d32",
    "b1 h14 hk2 q1 k40 d64",
    "b2 h8 hk2 q33 k70 d40 dv24 causal fp32",
    *(f"b2 h8 hk2 q1 k200 d128 {dtype}" for dtype in ("fp16", "bf16")),
    # Lengths: one query, one key, next to a power of two, unequal, rows that see no key.
    "b1 h2 q1 d64",
    "b2 h2 q1 k200 d64",
    "b1 h2 q1 k129 d64 causal",
    "b1 h2 q70 k1 d64",
    *(f"b1 h2 q{length} d64" for length in (15, 96, 128, 192)),
    *(f"b1 h2 q{length} d64 causal" for length in (16, 127, 129)),
    "b1 h2 q257 d32 causal",
    "b1 h2 q24 k40 d64 causal",
    "b1 h2 q100 k130 d64",
    "b1 h2 q70 k33 d64",
    "b1 h2 q33 k300 d64 causal",
    "b1 h2 q70 k33 d32 causal",
    "b1 h2 q64 k65 d64 causal",
    "b1 h2 q65 k64 d64 causal",
    "b1 h1 q256 d32 causal bf16",  # whole tiles
    "b1 h4 hk2 q16 k512 d32 causal fp16",
    "b1 h2 q128 k384 d32 causal bf16",
    "b2 h4 hk2 q1 k1 d64",
    "b1 h2 q257 d32",
    "b1 h2 q3 k1100 d64",
    "b1 h2 q33 k1100 d16 causal",
    "b1 h2 q33 k4200 d16 causal fp16",  # more keys than fp16 numbers
    *(f"b1 h2 q1 k8300 d64 {dtype}" for dtype in ("bf16", "fp16")),  # the most keys: sums kept in 16 bits stop growing
    "b1 h4 hk2 q1 k2048 d64",
    "b1 h1 q1030 k33 d16 bf16",
    "b1 h1 q1660 k33 d16 fp16",  # a sum in fp16 of what is the same is far off
    "b1 h1 q1030 d8 causal",
    "b1 h2 q256 d16 fp16",
    # Many query heads of a key head, many batches, more programs than a grid's second dimension has, values wider than keys.
    "b1 h16 hk1 q20 d64",
    "b2 h32 hk2 q3 k70 d64 causal",
    "b1 h64 hk2 q5 k33 d64",
    "b1 h128 hk1 q1 k40 d64",
    "b9 h2 q33 d32 causal",
    "b33 h8 q17 d16 causal",
    "b64 h1025 q1 k2 d8",
    "b1 h2 q70 d64 dv128 fp16",
    "b1 h2 q70 d64 dv128 bf16",
    # What the others leave out of each two, where values are as wide as keys: of dtype, width, query heads a key head, queries,
    # keys, mask, memory order and batch. Then of each of these and narrower or wider values.
    "b2 h24 hk1 q33 k22 d65 causal bshd fp32",
    "b3 h6 hk1 q1 k512 d80 causal bshd fp32",
    "b1 h12 hk1 q1 k300 d192 causal bshd bf16",
    "b2 h12 hk1 q3 k40 d256 bshd fp32",
    "b2 h32 hk1 q17 k11 d192 causal bshd fp32",
    "b3 h12 hk1 q3 k100 d72 causal fp16",
    "b1 h6 hk1 q65 k43 d128 causal bshd bf16",
    "b1 h12 hk1 q70 d24 causal bshd fp32",
    "b3 h32 hk1 q1 k257 d33 bf16",
    "b1 h4 hk2 q33 k22 d256 bshd fp32",
    "b2 h5 hk1 q1 k300 d256 causal fp32",
    "b1 h16 hk1 q65 k43 d40 causal bshd fp16",
    "b1 h16 hk1 q3 k300 d128 causal bf16",
    "b1 h14 hk2 q40 d65 causal bshd fp16",
    "b1 h10 hk2 q3 k129 d192 causal fp32",
    "b1 h4 hk2 q40 k70 d65 bshd fp32",
    "b1 h2 hk1 q129 k257 d40 causal bshd bf16",
    "b1 h32 hk1 q33 k22 d32 fp16",
    "b3 h48 hk1 q1 k40 d128 causal fp32",
    "b1 h16 hk1 q17 k11 d256 bshd fp16",
    "b1 h4 hk2 q65 k43 d192 causal bf16",
    "b1 h12 hk1 q65 k43 d64 causal fp32",
    "b2 h24 hk1 q1 k70 d192 dv256 causal bshd fp32",
    "b2 h8 hk2 q33 k22 d33 dv96 bshd fp32",
    "b1 h14 hk2 q1 k1100 d65 dv32 causal fp16",
    "b3 h5 hk1 q1 k300 d80 dv256 causal bshd fp32",
    "b1 h16 hk1 q40 k26 d256 dv16 causal fp16",
    "b1 h12 hk1 q40 d128 dv24 causal bshd fp16",
    "b2 h32 hk1 q17 d24 dv128 causal bf16",
    "b2 h2 q33 k300 d32 dv8 causal fp32",
    "b1 h7 hk1 q33 d128 dv256 causal bshd fp16",
    # [batch, seq, heads, head_dim] in memory, alone and with the rest.
    "b3 h8 hk2 q1 k129 d64 causal bshd",
    "b2 h3 q70 d64 bshd",
    "b2 h3 q129 d64 causal bshd",
    "b3 h4 hk2 q33 k70 d40 dv24 causal bshd",
)


# Problems of what a function may have arguments for, by those: shared heads, one query, more queries than keys, keys of whole
# tiles that no query of a tile sees, every dtype; the last with what models have beside it.
_ALONE = {
    "softcap": (
        "attn b2 h2 q40 k60 d64 bf16 causal softcap2",
        "attn b1 h2 q40 d64 fp16 softcap50",
        "attn b2 h4 hk2 q1 k70 d128 bf16 causal softcap20",
        "attn b1 h4 hk2 q40 d40 fp32 causal softcap3",
    ),
    "sinks": (
        "attn b2 h4 hk2 q40 k60 d64 bf16 causal sinks",
        "attn b2 h8 hk2 q1 k70 d64 fp16 causal sinks",
        "attn b1 h2 q60 k40 d128 fp32 causal sinks",
    ),
    "alibi_slopes": (
        "attn b2 h4 q40 k60 d64 fp16 causal alibi",
        "attn b1 h4 hk2 q60 k40 d64 bf16 alibi",
        "attn b2 h4 hk2 q1 k70 d128 fp32 causal alibi",
        "attn b1 h2 q3 k4200 d16 fp16 causal alibi",
    ),
    "attn_mask": (
        "attn b2 h2 q33 k40 d64 fp16 boolmask",
        "attn b2 h2 q40 k33 d64 bf16 causal boolmask",  # which hides every key from some queries
        "attn b2 h4 hk2 q1 k150 d128 fp32 boolmask",
        "attn b2 h2 q33 k40 d64 fp32 bias",
        "attn b2 h4 hk2 q1 k70 d64 fp16 bias",
        "attn b1 h4 hk2 q40 k150 d64 bf16 causal bias",
    ),
    "window_size": (
        "attn b1 h2 q40 k60 d64 bf16 causal left16",
        "attn b2 h4 hk2 q70 d64 fp16 left9 right3",
        "attn b1 h2 q40 d64 bf16 causal left0",
        "attn b1 h2 q40 k60 d64 fp16 right5",
        "attn b1 h2 q60 k40 d64 fp32 left7 right2",
        "attn b2 h4 hk2 q1 k200 d128 bf16 causal left16",
        "attn b2 h4 hk2 q300 d32 fp16 causal left20",
    ),
}
# By the same arguments, the words that each is asked with where it meets more: several tiles of queries; one query, many keys,
# wide heads that all share one of K and V; values of another width; each other argument, and what that is asked on, last.
_WORDS = {
    "window_size": ("left16",),
    "softcap": ("softcap2",),
    "sinks": ("sinks",),
    "alibi_slopes": ("alibi",),
    "attn_mask": ("boolmask", "bias"),
}
_OTHERWISE = {"window_size": ("left50", "left999"), "softcap": ("softcap5",)}  # other numbers on sizes that had one
_BESIDE = "b2 h8 hk2 q40 k200 d64 bf16 causal"
_MET = ("b1 h2 q150 d64 fp16", "b2 h8 hk1 q1 k1100 d256 bf16", "b1 h4 hk2 q33 k70 d40 dv24 fp32 causal", _BESIDE)
_NOT_TOGETHER = {"alibi_slopes", "attn_mask"}  # a problem has one bias


def sweep_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The problems of what a function has these arguments for, alone and each two together."""
    given = [name for name in _WORDS if name in arguments]
    pairs = (pair for pair in combinations(given, 2) if set(pair) != _NOT_TOGETHER)
    return (
        *((f"attn {_BESIDE}",) if given else ()),  # what is kept by sizes alone would lack the words
        *(text for name in given for text in _ALONE[name]),
        *(f"attn {sizes} {word}" for name in given for word in _WORDS[name] for sizes in _MET),
        *(f"attn {_BESIDE} {word}" for name in given for word in _OTHERWISE.get(name, ())),
        *(f"attn {_BESIDE} {a} {b}" for x, y in pairs for a, b in product(_WORDS[x], _WORDS[y])),
    )


def sweep() -> tuple[str, ...]:
    """Tiny problems that leave out no feature; those that name no dtype take the 16-bit ones in turn."""
    turns = cycle(("fp16", "bf16"))
    return tuple(f"attn {one}" if one.endswith(_DTYPES) else f"attn {one} {next(turns)}" for one in _SWEPT)


def _documents() -> Iterator[str]:
    yield "attn b1 h1 q4 d4 fp16"
    yield "attn b1 h1 q32 d32 fp16"
    for seqlen in _SWEEP:
        yield f"attn b1 h1 q{seqlen} d64 fp16"
    for batch, heads, seqlen in _SCALING:
        yield f"attn b{batch} h{heads} q{seqlen} d64 fp16"
    for batch, heads, seqlen in _BF16:
        yield f"attn b{batch} h{heads} q{seqlen} d64 bf16"
    for batch, heads, seqlen in _CAUSAL:
        yield f"attn b{batch} h{heads} q{seqlen} d64 fp16 causal"


def _long() -> Iterator[str]:
    for dim in (64, 128, 256):
        for mask in ("", " causal"):
            for power in range(9, 15):
                seqlen = 2**power
                yield f"attn b{_TOKENS // seqlen} h{_WIDTH // dim} q{seqlen} d{dim} bf16{mask} bshd"


def _fp32() -> Iterator[str]:
    for dim in (64, 128, 256):
        for mask in ("", " causal"):
            for seqlen in (512, 4096):
                yield f"attn b{_TOKENS // 2 // seqlen} h{_WIDTH // dim} q{seqlen} d{dim} fp32{mask} bshd"
    yield "attn b1 h32 hk8 q1000 k3000 d96 fp32 causal bshd"
    yield "attn b1 h16 q2500 d160 fp32 bshd"


_QUICK = ("attn b1 h1 q128 d64 fp16", "attn b32 h8 q256 d64 fp16", "attn b2 h8 q512 d64 bf16 causal",
          "attn b1 h16 hk4 q1000 k1500 d96 bf16 causal", "attn b4 h16 q4096 d128 bf16 bshd",
          "attn b4 h16 q4096 d128 bf16 causal bshd")  # fmt: skip
_CPU = ("attn b1 h1 q64 d64 fp32", "attn b1 h4 q128 d64 fp32", "attn b2 h8 q256 d64 fp32 causal",
        "attn b1 h8 hk2 q200 k333 d40 fp32", "attn b2 h4 hk2 q50 k83 d40 fp32 causal bshd", "attn b1 h8 q512 d64 fp32 causal",
        "attn b1 h4 q256 d64 bf16")  # fmt: skip
_NAMED: dict[str, Iterable[str]] = {
    "documents": _documents(), "long": _long(), "fp32": _fp32(), "quick": _QUICK, "cpu": _CPU, **suites_serving.SUITES
}  # fmt: skip
SUITES: dict[str, tuple[str, ...]] = {name: tuple(dict.fromkeys(texts)) for name, texts in _NAMED.items()}

_FEW_QUERIES = 4  # keys for each query, from which on a problem is one of decoding or of chunks
_REACH = 0.75  # log2 of the factor by which a length may differ from the suite's
_HEAD_DIMS = (40, 64, 72, 80, 96, 128, 160, 192, 256)
_GROUPS = (1, 1, 2, 4, 8)  # query heads for each key/value head


def drawn(near: AttentionProblem, chance: Random) -> AttentionProblem:
    """A problem around one of a suite: another length, head dimension, group of heads and mask, about as many tokens and about
    as wide. One in six has more keys than queries; one in eight another value dimension. Around a problem of serving it keeps
    what that is (suites_serving.py)."""
    if near.features != PLAIN or near.seqlen_k >= _FEW_QUERIES * near.seqlen_q:
        return suites_serving.drawn(near, chance)
    seqlen = max(1, round(near.seqlen_q * 2.0 ** chance.uniform(-_REACH, _REACH)))
    head_dim, group = chance.choice(_HEAD_DIMS), chance.choice(_GROUPS)
    width = near.heads * near.head_dim
    heads_kv = max(1, round(width / head_dim / group))
    return replace(
        near,
        batch=max(1, near.batch * near.seqlen_q // seqlen),
        heads=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=seqlen,
        seqlen_k=seqlen if chance.random() > 1 / 6 else round(seqlen * 2.0 ** chance.uniform(0.1, 2.0)),
        head_dim=head_dim,
        head_dim_v=128 if head_dim == 192 and chance.random() < 0.5 else head_dim,
        mask=chance.choice(("full", "causal")),
    )
