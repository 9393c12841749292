"""``flashmoe_science.proof``: the same from Python, as objects."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import typer

from flashmoe_science import proof
from flashmoe_science.cli.main import app
from flashmoe_science.cli.options import earlier_of
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.measure import run
from flashmoe_science.measure.request import Request
from flashmoe_science.records import RefusalRow
from flashmoe_science.store import read_run

FAULTS = Path(__file__).parents[1] / "harness" / "faults"
SQUARE, LONGER = "attn b1 h2 q16 d16 fp32 causal", "attn b1 h2 q24 k40 d64 fp16 causal"


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_function_is_named_by_its_file_or_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_alone.py").write_text("def attention(q, k, v): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    attention = importlib.import_module("mine_alone").attention
    assert proof.spec_of(attention) == f"{tmp_path / 'mine_alone.py'}:attention"
    assert proof.spec_of(proof.spec_of) == "flashmoe_science.proof:spec_of"
    assert proof.spec_of("flashmoe_science.proof:check") == "flashmoe_science.proof:check"


def test_what_no_other_process_finds_is_refused_with_what_to_pass() -> None:
    def inner(q: object) -> object:
        return q

    for one in (inner, lambda q: q):
        with pytest.raises(ValueError, match=r"cannot be found from another process; .*'path/to/file\.py:"):
            proof.spec_of(one)


@pytest.mark.usefixtures("short_sweep")
def test_check_returns_what_came_of_every_problem() -> None:
    result = proof.check(f"{FAULTS / 'another_mask.py'}:attention")
    assert not result.passed
    assert result.exit_code == 1
    assert "mask-top-left" in result.codes
    assert {one.answer for one in result.checked} == {"right", "wrong", "not served"}


def test_one_problem_and_one_rival_are_taken_as_they_are(tmp_path: Path) -> None:
    """``against="sdpa"`` was taken for the rivals s, d, p and a."""
    spec = f"{FAULTS / 'another_mask.py'}:attention"
    proved = proof.prove(spec, SQUARE, against="sdpa", quick=True, out=tmp_path, budget_s=1e-9)
    assert (proved.exit_code, proved.passed, proved.verdicts) == (ExitCode.NO_NUMBER, False, ())
    asked: list[Request] = []

    def plan(request: Request) -> None:
        asked.append(request)
        raise ValueError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Plan", plan)
        for against in ("sdpa", ["sdpa"], proof.check):
            with pytest.raises(ValueError, match="enough"):
                proof.prove(spec, SQUARE, against=against)
    assert [one.against for one in asked] == [("sdpa",), ("sdpa",), ("flashmoe_science.proof:check",)]
    assert {one.targets for one in asked} == {(spec, SQUARE)}


def test_a_run_that_python_began_is_resumed_with_what_python_asked(tmp_path: Path) -> None:
    """Its record named the function alone, and --resume went on to the problems and rivals of the contract."""
    spec = f"{FAULTS / 'another_mask.py'}:attention"
    proof.prove(
        spec, [SQUARE, LONGER], against=["sdpa", proof.check], quick=True, out=tmp_path, seed=7, watchdog_s=9.5, budget_s=1e-9
    )
    context = typer.Context(typer.main.get_command(app).get_command(None, "prove"))  # type: ignore[attr-defined]
    _, options = earlier_of(context, tmp_path, ())
    assert options["targets"] == [spec, SQUARE, LONGER]
    assert options["against"] == ["sdpa", "flashmoe_science.proof:check"]
    assert (options["quick"], options["seed"], options["watchdog"]) == (True, 7, 9.5)


@pytest.mark.slow
@pytest.mark.usefixtures("short_sweep")
def test_prove_checks_the_sweep_first_and_still_times_what_is_named(tmp_path: Path) -> None:
    spec = f"{FAULTS / 'another_mask.py'}:attention"
    proved = proof.prove(spec, [SQUARE], against=["sdpa"], quick=True, out=tmp_path)
    assert proved.outcome.exit_code == 1
    assert not proved.passed
    assert "mask-top-left" in proved.outcome.codes
    rows = read_run(tmp_path / "run-functions.jsonl").rows
    refused = {row.problem: row.codes for row in rows if isinstance(row, RefusalRow) and row.stage == "correctness"}
    assert SQUARE not in refused
    assert "mask-top-left" in refused[LONGER]
    assert SQUARE in {one.problem for one in proved.verdicts}
    assert (tmp_path / "report.html").is_file()
