"""The oracle: contracts that nothing can be held to, and how a wrong output is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.contract import Contract, Output
from flashmoe_science.measure.inputs import Case, Files
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.problem import CustomProblem

ROWS, COLS = 40, 24


class Doubled(Contract):
    """Twice x [rows, cols]; what it gives can be made wrong."""

    name = "doubled"

    def __init__(
        self,
        made: Callable[[torch.Generator], Any] = lambda generator: torch.randn(ROWS, COLS, generator=generator),
        right: Callable[[torch.Tensor], Any] = lambda x: 2 * x,
    ) -> None:
        self._made, self._right = made, right

    def default_problems(self) -> Sequence[CustomProblem]:
        return [self.problem("fp32", rows=ROWS, cols=COLS)]

    def inputs(self, problem: CustomProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": self._made(generator)}

    def reference(self, problem: CustomProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        right: torch.Tensor = self._right(inputs["x"])
        return right

    def flops(self, problem: CustomProblem) -> int:
        return ROWS * COLS

    def min_bytes(self, problem: CustomProblem) -> int:
        return 8 * ROWS * COLS


def oracle(held: Contract, monkeypatch: pytest.MonkeyPatch) -> Oracle:
    monkeypatch.setattr("flashmoe_science.measure.oracle.contract_of", lambda fn: held)
    monkeypatch.setattr("flashmoe_science.measure.oracle.load", lambda spec: None)
    made = Oracle(Files(), torch.device("cpu"))
    made.open("mine.py:fn")
    made.problem(str(held.default_problems()[0]))
    return made


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (Doubled(lambda _: torch.randn(ROWS, COLS)), "must draw from the generator that it is given; 'x' came out otherwise"),
        (Doubled(lambda own: drawn(own, 0, COLS)), "gives no numbers at all"),
        (Doubled(lambda own: drawn(own, ROWS, 1).expand(ROWS, COLS)), "'x' is one whose elements share memory"),
        (Doubled(lambda own: drawn(own, ROWS, COLS).to_sparse()), "'x' is a tensor of layout sparse_coo"),
        (Doubled(right=lambda x: torch.complex(x, x)), "is complex; give real tensors"),
        (Doubled(right=lambda x: x[:0]), "is empty: there is nothing to hold an output to"),
        (Doubled(right=lambda x: None), "gave a NoneType, not a tensor"),
    ],
)
def test_inputs_and_references_that_no_run_can_rest_on_are_refused(
    held: Doubled, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        oracle(held, monkeypatch).outputs(Case(0))


def test_a_cost_that_its_contract_does_not_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, text = oracle(Doubled(), monkeypatch), "op doubled rows40 cols24 fp32 flops{} bytes{}"
    assert judge.problem(text.format(960, 7680))["cannot"] is None
    assert judge.problem(text.format(1, 7680))["cannot"] == "it says flops1, and its contract counts 960"
    assert judge.problem(text.format(960, 1))["cannot"] == "it says bytes1, and its contract counts 7680"


def test_errors_go_by_the_names_of_the_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Backward(Doubled):
        outputs = (Output("dq"), Output("dk"), Output("dbias", optional=True))

    judge = oracle(Backward(right=lambda x: (2 * x, 3 * x, 4 * x)), monkeypatch)
    x = drawn(torch.Generator().manual_seed(0), ROWS, COLS)
    Files().put(str(tmp_path / "three"), [2 * x, 3 * x, 5 * x])
    found = judge.check(Case(0), str(tmp_path / "three"))
    assert list(found["stats"]) == ["dq", "dk", "dbias"]
    assert all(reason.startswith("dbias: ") for reason in found["reasons"])
    assert found["reasons"]
    Files().put(str(tmp_path / "two"), [2 * x, 3 * x])
    found = judge.check(Case(0), str(tmp_path / "two"), count=2)
    assert (list(found["stats"]), found["reasons"]) == (["dq", "dk"], [])
