"""Problems of an operation of one's own: their text form, and what is refused."""

from __future__ import annotations

import pytest

from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import CustomProblem, ProblemError


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
