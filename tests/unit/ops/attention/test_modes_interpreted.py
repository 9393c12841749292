"""split_triton in Triton's interpreter on small problems of every mode, held as the exam holds it."""

from __future__ import annotations

from tests.unit.interpreter import Interpreter

from flashmoe_science.ops.attention.suites_serving import small


def test_every_problem_with_modes_is_right(interpreted: Interpreter) -> None:
    found = interpreted("ops/attention/modes_cases.py")
    assert {problem: reasons for problem, reasons in found.items() if reasons} == {}
    assert found.keys() == set(small())
