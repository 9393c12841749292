"""split_triton in Triton's interpreter on small problems of every mode, held as the exam holds it."""

from __future__ import annotations

from tests.unit.interpreter import Interpreter

from flashmoe_science.ops.attention.proof.suites_serving import small


def test_every_problem_with_modes_is_right(interpreted: Interpreter) -> None:
    found = interpreted("ops/attention/features_cases.py")
    assert {problem: reasons for problem, reasons in found.items() if reasons} == {}
    assert found.keys() == set(small())


def test_a_row_whose_every_bias_is_the_lowest_number_is_the_mean_of_its_values(interpreted: Interpreter) -> None:
    """The lowest of bf16, times log2(e), is beyond fp32."""
    lowest, hidden = interpreted("ops/attention/lowest_bias.py")
    assert lowest < 0.01
    assert hidden == 0.0
