"""Named lists of problems of the backward. ``train`` is what models are trained on, of at most 60 rows; ``train-short`` of up
to 512 tokens, where launches and the host count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashmoe_science.ops.attention.problem.backward import parse
from flashmoe_science.ops.attention.proof import suites as forward

SMOKE, SMOKE_CPU = "attnbwd b1 h2 q64 d64 fp16", "attnbwd b1 h2 q64 d64 fp32"
BUILD = ("attnbwd b4 h16 q4096 d128 bf16 causal", "attnbwd b8 h4 q128 d64 fp16", "attnbwd b4 h8 q4096 d256 bf16")
COMMON = ("attnbwd b8 h8 q512 d64 fp16 causal", "attnbwd b4 h16 q4096 d128 bf16", "attnbwd b4 h16 q4096 d128 bf16 causal")
COMMON_CPU = ("attnbwd b1 h1 q64 d64 fp32", "attnbwd b1 h4 q128 d64 fp32 causal", "attnbwd b1 h4 q128 d64 bf16 causal")

_TINY = 20_000_000  # operations
_MOST_SHARING = 64
_TOKENS, _WIDTH = 16384, 2048  # of a problem, over all batches; heads times head_dim
_DTYPES = ("fp16", "bf16", "fp32")
_SMALL = (
    "b1 h1 q4 d4",
    "b1 h2 q65 d64 causal",
    "b2 h4 hk2 q33 k70 d40 dv24 causal",
    "b1 h2 q70 k33 d32 causal",
    "b1 h2 q70 k33 d32 causal-topleft",
    "b1 h3 hk1 q1 k90 d128",
    "b1 h2 q50 k65 d96 bshd",
    "b2 h1 q1 d1",
)
_FEATURES = (
    "b2 h4 hk2 q40 k50 d16 bf16 causal left7",
    "b1 h2 q40 k60 d24 fp16 left9 right3 softcap2",
    "b2 h2 q33 k40 d16 bf16 causal sinks",
    "b2 h4 hk1 q33 k40 d16 fp16 alibi",
    "b2 h2 q33 k40 d16 bf16 boolmask",
    "b2 h2 q33 k40 d16 fp32 bias softcap3",
    "b2 h4 hk2 q40 k40 d16 bf16 causal prefix9",
    "b3 h4 hk2 q40 k40 d16 bf16 causal bshd packed",
    "b3 h2 q30 k50 d16 fp16 bshd left5 right9 sinks packed",
)


def small() -> tuple[str, ...]:
    """Odd and tiny shapes, every mask, grouped heads, rows that see no key, each in every dtype; then every feature."""
    return (*(f"attnbwd {shape} {dtype}" for shape in _SMALL for dtype in _DTYPES), *(f"attnbwd {one}" for one in _FEATURES))


def sweep() -> tuple[str, ...]:
    """The forward's tiny problems, but those that the products of a backward make larger than tiny and those with more heads of
    a key head than models are trained with; and the widest head."""
    problems = (parse(text.replace("attn ", "attnbwd ", 1)) for text in forward.sweep())
    tiny = (one for one in problems if one.flops() < _TINY and one.heads <= _MOST_SHARING * one.heads_kv)
    return (*map(str, tiny), "attnbwd b1 h1 q70 d256 bf16 causal")


def sweep_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The forward's problems of what a function has these arguments for."""
    return tuple(text.replace("attn ", "attnbwd ", 1) for text in forward.sweep_of(arguments))


def _train() -> Iterator[str]:
    for dim in ("d64", "d128", "d256"):  # heads of their own keys
        heads = _WIDTH // int(dim[1:])
        for mask in ("", " causal"):
            for seqlen in (512, 2048, 4096, 16384):
                yield f"attnbwd b{_TOKENS // seqlen} h{heads} q{seqlen} {dim} bf16{mask} bshd"
    for mask in ("", " causal"):
        for seqlen in (1024, 4096, 16384):
            yield f"attnbwd b{_TOKENS // seqlen} h16 q{seqlen} d96 bf16{mask} bshd"
            yield f"attnbwd b{_TOKENS // seqlen} h16 q{seqlen} d192 dv128 bf16{mask} bshd"
    for mask in ("", " causal"):
        for seqlen in (2048, 8192):
            yield f"attnbwd b{_TOKENS // seqlen} h32 hk8 q{seqlen} d128 bf16{mask} bshd"
            yield f"attnbwd b{_TOKENS // seqlen} h32 hk4 q{seqlen} d128 bf16{mask} bshd"
            yield f"attnbwd b{_TOKENS // seqlen} h64 hk8 q{seqlen} d64 bf16{mask} bshd"
    for shared in ("h16", "h32 hk8"):
        yield f"attnbwd b8 {shared} q4096 d128 bf16 causal bshd packed"
        yield f"attnbwd b2 {shared} q8192 d128 bf16 causal bshd left1023"
    yield "attnbwd b8 h32 q4096 d64 bf16 causal bshd packed"
    yield "attnbwd b2 h64 hk8 q8192 d64 bf16 causal bshd left1023"
    for text in ("b1 h16 q32768 d128", "b1 h8 q65536 d128"):
        yield f"attnbwd {text} bf16 causal bshd"


def _short() -> Iterator[str]:
    for dim in ("d64", "d128"):
        for mask in ("", " causal"):
            for batch, seqlen in ((1, 64), (1, 128), (1, 256), (1, 512), (4, 128), (4, 512), (32, 128), (32, 512)):
                yield f"attnbwd b{batch} h16 q{seqlen} {dim} bf16{mask} bshd"


SUITES: dict[str, tuple[str, ...]] = {
    "train": tuple(_train()),
    "train-short": tuple(_short()),
    "quick-backward": COMMON,
    "cpu-backward": COMMON_CPU,
}
