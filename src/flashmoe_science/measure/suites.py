"""Named lists of problems. ``documents`` are the configurations of the documents that asked for this project."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.problem import AttentionProblem, as_attention
from flashmoe_science.problem import Problem, ProblemError

_TOKENS = 16384  # of a `long` problem, over all batches
_WIDTH = 2048  # heads times head_dim of a `long` problem
_SWEEP = (64, 65, 128, 192, 256, 512)
_SCALING = ((4, 1, 128), (1, 4, 128), (4, 4, 128), (8, 4, 128), (8, 8, 128), (1, 8, 128), (32, 8, 128), (32, 8, 256),
            (2, 8, 512), (1, 8, 2048), (4, 8, 2048))  # fmt: skip
_BF16 = ((1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256))
_CAUSAL = ((1, 1, 64), (1, 1, 128), (1, 1, 512), (8, 4, 128), (32, 8, 256), (4, 8, 2048))


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


def _quick() -> Iterator[str]:
    yield "attn b1 h1 q128 d64 fp16"
    yield "attn b32 h8 q256 d64 fp16"
    yield "attn b2 h8 q512 d64 bf16 causal"
    yield "attn b1 h16 hk4 q1000 k1500 d96 bf16 causal"
    yield "attn b4 h16 q4096 d128 bf16 bshd"
    yield "attn b4 h16 q4096 d128 bf16 causal bshd"


def _cpu() -> Iterator[str]:
    yield "attn b1 h1 q64 d64 fp32"
    yield "attn b1 h4 q128 d64 fp32"
    yield "attn b2 h8 q256 d64 fp32 causal"
    yield "attn b1 h8 hk2 q200 k333 d40 fp32"
    yield "attn b2 h4 hk2 q50 k83 d40 fp32 causal bshd"
    yield "attn b1 h8 q512 d64 fp32 causal"
    yield "attn b1 h4 q256 d64 bf16"


SUITES: dict[str, Callable[[], Iterator[str]]] = {"documents": _documents, "long": _long, "quick": _quick, "cpu": _cpu}


class SuiteError(ValueError):
    """A suite that does not exist, said in one line with the ones that do."""


def suite(name: str) -> tuple[AttentionProblem, ...]:
    """The problems of a suite, in order, none twice.

    Raises:
        SuiteError: there is no such suite.
    """
    if name not in SUITES:
        raise SuiteError(f"suite {name!r} is unknown; it must be one of {', '.join(SUITES)}")
    return tuple(dict.fromkeys(as_attention(parse_problem(text)) for text in SUITES[name]()))


def problems_named(words: list[str]) -> tuple[str, tuple[Problem, ...]]:
    """What the command line asked for: names of suites and texts of problems, in any mixture.

    Returns:
        The label of the run (the suite's name where one was named alone, else "custom") and its problems.

    Raises:
        SuiteError: a word is neither a suite nor begins as a problem does.
        ProblemError: a problem's text does not parse.
    """
    problems: dict[Problem, None] = {}
    for word in words:
        if word in SUITES:
            problems |= dict.fromkeys(suite(word))
        elif set(word.split()[:1]) & set(FIRST_WORDS):
            problems[parse_problem(word)] = None
        else:
            first = " or ".join(map(repr, FIRST_WORDS))
            raise SuiteError(f"{word!r} is neither a problem (those begin with {first}) nor a suite ({', '.join(SUITES)})")
    if not problems:
        raise ProblemError("no problem was named")
    return (words[0] if len(words) == 1 and words[0] in SUITES else "custom"), tuple(problems)
