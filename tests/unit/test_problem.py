"""Problems of an operation of one's own: their text form, and what is refused."""

from __future__ import annotations

import pytest

from flashmoe_science.hardware.floor import floor_ns
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.operations import is_operation, parse_problem
from flashmoe_science.problem import CustomProblem, DistributedProblem, ProblemError


def test_a_text_says_what_it_costs_and_its_sizes() -> None:
    text = "op row_softmax rows4096 cols1024 fp16 flops16777216 bytes16777217"
    problem = parse_problem(text)
    assert str(problem) == text
    assert isinstance(problem, CustomProblem)
    assert (problem.op, problem.dtype, problem.flops(), problem.min_bytes()) == ("row_softmax", "fp16", 16777216, 16777217)
    assert (problem["rows"], problem["cols"]) == (4096, 1024)
    with pytest.raises(ProblemError, match="it must be one of rows, cols"):
        problem["heads"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("op", "names no operation"),
        ("op row_softmax rows4 fp16 flops1", "lacks bytes<n>"),
        ("op row_softmax rows4 flops1 bytes1", "lacks a dtype"),
        ("op moe rows4 fp16 flops1 bytes1", "op is 'moe', which is an operation of the package"),
        ("op Row rows4 fp16 flops1 bytes1", "op is 'Row'"),
        ("op row rows4 rows5 fp16 flops1 bytes1", "gives 'rows' twice"),
        ("op row rows0 fp16 flops1 bytes1", "rows is 0"),
        ("op row fp8 bf16 flops1 bytes1", "is named 'fp'"),
        ("op row 4rows bf16 flops1 bytes1", "unknown word '4rows'"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        parse_problem(text)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "attn b1 h32 hk8 q16384 d128 bf16 causal bshd cp2",
        "attnbwd b1 h32 q32768 d128 bf16 causal cp4",
        "moe t8192 e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed ep8",
    ],
)
def test_ranks_share_the_work_of_a_problem(text: str) -> None:
    problem, words = parse_problem(text), text.split()
    assert isinstance(problem, DistributedProblem)
    assert str(problem) == text
    assert (problem.whole, problem.gpus()) == (parse_problem(" ".join(words[:-1])), int(words[-1][2:]))
    assert (problem.flops(), problem.dtype, problem.whole.gpus()) == (problem.whole.flops(), "bf16", 1)
    assert not is_operation(problem.op)
    gpu = GPUS["h200"]
    assert floor_ns(problem, gpu, "cold") == pytest.approx(floor_ns(problem.whole, gpu, "cold") / problem.gpus())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("attn b1 h1 q8 d8 bf16 ep2", "unknown word 'ep2'"),
        ("attn b1 h1 q8 d8 cp2 bf16", "unknown word 'cp2'"),
        ("attn b1 h1 q8 d8 bf16 cp1", "the number of ranks after 'cp' is 1"),
        ("moe t8 e4 k2 d8 f8 bf16 cp2", "unknown word 'cp2'"),
        ("moebwd t8 e4 k2 d8 f8 bf16 ep2", "unknown word 'ep2'"),
        ("cp2", "does not begin with"),
    ],
)
def test_words_of_ranks_that_are_not_are_refused(text: str, what: str) -> None:
    with pytest.raises(ProblemError, match=what):
        parse_problem(text)
