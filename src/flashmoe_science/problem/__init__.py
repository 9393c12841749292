"""What is to be computed: shapes, dtypes and flags of one call, with its cost. Knows nothing of torch.

A problem has a short text form that the command line prints and parses, and that records store::

    attn b2 h16 hk4 q4096 k4096 d128 bf16 causal
    moe t4096 e64 k8 d1024 f2048 bf16
    op row_softmax rows4096 cols1024 fp16 flops16777216 bytes16777216

Every problem has ``op``, ``dtype``, ``flops()``, ``min_bytes()``, ``queries()`` (None where the word has no meaning) and
``without_layout()``, and ``parse_problem(str(problem))`` is the problem.
"""

from __future__ import annotations

from collections.abc import Callable

from flashmoe_science.problem.attention import MAX_HEAD_DIM, AttentionProblem, Layout, Mask, parse_attention
from flashmoe_science.problem.custom import CustomProblem, parse_custom
from flashmoe_science.problem.moe import MoEProblem, parse_moe
from flashmoe_science.problem.words import DTYPE_BYTES, Dtype, ProblemError

__all__ = [
    "DTYPE_BYTES",
    "FIRST_WORDS",
    "MAX_HEAD_DIM",
    "AttentionProblem",
    "CustomProblem",
    "Dtype",
    "Layout",
    "Mask",
    "MoEProblem",
    "Problem",
    "ProblemError",
    "as_attention",
    "parse_problem",
]

Problem = AttentionProblem | MoEProblem | CustomProblem
FIRST_WORDS: dict[str, Callable[[str], Problem]] = {"attn": parse_attention, "moe": parse_moe, "op": parse_custom}


def parse_problem(text: str) -> Problem:
    """Read the text form of a problem.

    Raises:
        ProblemError: a word is not understood, stands twice or is missing; the message gives the grammar.
    """
    parse = FIRST_WORDS.get(next(iter(text.split()), ""))
    if parse is None:
        raise ProblemError(f"problem {text!r} does not begin with {', '.join(map(repr, FIRST_WORDS))}")
    return parse(text)


def as_attention(problem: Problem) -> AttentionProblem:
    """The problem itself, where it is attention. Raises ProblemError where it is another operation's."""
    if not isinstance(problem, AttentionProblem):
        raise ProblemError(f"problem '{problem}' is one of {problem.op}; here it must be attention, and begin with 'attn'")
    return problem
