"""Problems of an operation of one's own: their text form, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import CustomProblem, ProblemError

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda name: name not in ("flops", "bytes", "fp", "bf"))


@st.composite
def problems(draw: st.DrawFn) -> CustomProblem:
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    return CustomProblem(
        op=draw(st.sampled_from(["row_softmax", "add2", "x"])),
        sizes=tuple((name, draw(st.integers(1, 2**31 - 1))) for name in names),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        flop_count=draw(st.integers(0, 2**40)),
        byte_count=draw(st.integers(0, 2**40)),
    )


@settings(max_examples=40)
@given(problems())
def test_the_text_form_reads_back(problem: CustomProblem) -> None:
    assert parse_problem(str(problem)) == problem


def test_a_text_says_what_it_costs_and_its_sizes() -> None:
    problem = parse_problem("op row_softmax rows4096 cols1024 fp16 flops16777216 bytes16777217")
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
