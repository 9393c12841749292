"""The oracle: contracts that nothing can be held to, and how a wrong output is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.contract import Contract, Output
from flashmoe_science.measure.inputs import Case, Files, Memory, make
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.ops.attention.proof.contract import CONTRACT
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


def test_an_excess_of_some_elements_is_not_called_lower_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judge = oracle(Doubled(), monkeypatch)
    for where, named in ((slice(None), ["lower-precision"]), (slice(None, None, 100), [])):
        out = 2 * drawn(torch.Generator().manual_seed(0), ROWS, COLS)
        out.view(-1)[where] += 2e-6
        Files().put(str(tmp_path / "out"), [out])
        found = judge.check(Case(0), str(tmp_path / "out"), naming=True)
        assert found["reasons"]
        assert [code for code, _ in found["named"]] == named


# Chance


def attention_judge() -> tuple[Oracle, Memory]:
    handover = Memory()
    judge = Oracle(handover, torch.device("cpu"))
    judge.open("attention")
    judge.problem("attn b1 h2 q64 d32 fp32")
    return judge, handover


def checked(judge: Oracle, handover: Memory, case: Case, more: float = 0.0) -> dict[str, Any]:
    """What is said of PyTorch's attention, with ``more`` added to one element of it."""
    inputs = make(CONTRACT, judge._problem, torch.device("cpu"), case)
    out = torch.nn.functional.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"])
    out[0, 0, 0, 0] += more
    handover.put("out", [out])
    return judge.check(case, "out", count=1)


@pytest.mark.parametrize("seed", [7, 41])
def test_an_honest_kernel_is_not_condemned_by_chance(seed: int) -> None:
    """On large inputs a softmax is nearly one-hot and few errors are large: here more than twice as large as the plain ones."""
    judge, handover = attention_judge()
    case = Case(seed + 7919, "large")
    found = checked(judge, handover, case)
    assert found["reasons"] == []
    (one, _) = judge._expected(case)
    assert found["stats"]["out"]["max"] > replace(one, chance=None).bound.max
    assert found["stats"]["out"]["bound_max"] == one.bound.max < one.cap.max / 10


def test_where_errors_are_many_chance_leaves_their_rms_and_mean_as_they_are() -> None:
    judge, handover = attention_judge()
    for seed in range(5):
        assert checked(judge, handover, Case(seed), more=1e-4)["reasons"]
        (one, _) = judge._expected(Case(seed))
        before = replace(one, chance=None).bound
        assert (one.bound.rms, one.bound.mean) == (before.rms, before.mean)
        assert one.bound.max < 4 * before.max


def test_results_that_are_no_numbers_have_no_chance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judge = oracle(Doubled(right=lambda x: (2 * x, x > 0, (x > 0).sum(1))), monkeypatch)
    x = drawn(torch.Generator().manual_seed(0), ROWS, COLS)
    Files().put(str(tmp_path / "out"), [2 * x + 2e-6, x > 0, (x > 0).sum(1) + 1])
    reasons = judge.check(Case(0), str(tmp_path / "out"))["reasons"]
    assert [reason.split(":")[0] for reason in reasons if "maximum" in reason] == ["output 0", "output 2"]


def test_chance_is_asked_for_only_beyond_twice_the_plain_error_and_under_the_cap() -> None:
    judge, handover = attention_judge()
    for more, drawn in ((0.0, False), (1.0, False), (1e-4, True)):
        found = checked(judge, handover, Case(3), more)
        assert bool(found["reasons"]) is (more > 0)
        assert (judge._expected(Case(3))[0].chance is not None) is drawn


def test_at_most_one_reference_is_kept_while_the_next_is_computed_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = oracle(Doubled(), monkeypatch)
    kept, maths = [], judge._maths
    monkeypatch.setattr(judge, "_maths", lambda case: kept.append(len(judge._references)) or maths(case))
    for room, seen in ((2**30, [0, 1, 2, 3]), (0, [0, 1, 1, 1])):
        judge._references.clear()
        judge._kept = room
        kept.clear()
        for seed in (0, 1, 0, 2, 3):
            judge.outputs(Case(seed))
        assert kept == seen
