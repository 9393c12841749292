"""The oracle: contracts that nothing can be held to, and how a wrong output is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.contract import Contract
from flashmoe_science.measure.function_child import introduced
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


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda generator: torch.randn(ROWS, COLS), "must draw from the generator that it is given; 'x' came out otherwise"),
        (lambda generator: torch.randn(0, COLS, generator=generator), "gives no numbers at all"),
        (
            lambda generator: torch.randn(ROWS, 1, generator=generator).expand(ROWS, COLS),
            "'x' is one whose elements share memory",
        ),
        (lambda generator: torch.randn(ROWS, COLS, generator=generator).to_sparse(), "'x' is a tensor of layout sparse_coo"),
    ],
)
def test_inputs_that_no_run_can_rest_on_are_refused(
    made: Callable[[torch.Generator], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        oracle(Doubled(made), monkeypatch)


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (lambda x: torch.complex(x, x), "is complex; give real tensors"),
        (lambda x: x[:0], "is empty: there is nothing to hold an output to"),
        (lambda x: None, "gave a NoneType, not a tensor"),
    ],
)
def test_references_that_no_output_can_be_held_to_are_refused(
    right: Callable[[torch.Tensor], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        oracle(Doubled(right=right), monkeypatch).outputs(Case(0).as_dict())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rivals": [3]}, "a rival of its contract is called 3; a name is letters, digits and any of"),
        ({"rivals": ["a:b"]}, "a rival of its contract is called 'a:b'"),
        ({"problems": [5]}, r"problems of its contract is \[5\]; it must be texts"),
        ({"variants": "wide"}, "variants of its contract is 'wide'; it must be texts"),
    ],
)
def test_what_no_record_could_hold_of_a_contract_is_refused(said: dict[str, Any], message: str) -> None:
    texts = {"problems": [], "distributions": ["normal"], "variants": [], "sweep": [], "sweep_variants": []}
    whole = texts | {"rivals": ["torch-mm", "grouped_mm"]}
    introduced(whole)
    with pytest.raises(ValueError, match=message):
        introduced(whole | said)


def spoilt(x: torch.Tensor, where: Any, by: float) -> torch.Tensor:
    x[where] += by
    return x


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda x: x, None),
        (lambda x: torch.full_like(x, 0.5), "its output is constant (0.5 everywhere)"),
        (lambda x: spoilt(x, (3, 4), 1.0), "1 of 960 elements is wrong, the rest are right"),
        (lambda x: spoilt(x, -1, 0.001), "what is wrong lies at index 39 of dimension 0 (of 40), the rest is right"),
        (lambda x: spoilt(x, (slice(None), 5), 1.0), "what is wrong lies at index 5 of dimension 1 (of 24), the rest is right"),
        (lambda x: x.bfloat16().float(), "as lower precision inside makes it"),
    ],
)
def test_a_wrong_output_is_called_what_it_looks_like(
    wrong: Callable[[torch.Tensor], torch.Tensor], named: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = Doubled()
    judge = oracle(held, monkeypatch)
    x = held.inputs(held.default_problems()[0], torch.device("cpu"), torch.Generator().manual_seed(1))["x"]
    path = tmp_path / "outputs"
    path.write_bytes(wrong(2 * x).numpy().tobytes())
    said = judge.check(Case(1).as_dict(), str(path), naming=True)
    assert bool(said["reasons"]) == (named is not None)
    assert named is None or named in "; ".join(words for _, words in said["named"])
