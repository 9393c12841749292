"""What runs that were cut leave to do, and what of them stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.harness.rows import Rows
from tests.unit.fabricated import errors

from flashmoe_science.measure import session as module
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.finding import Finding
from flashmoe_science.measure.request import Entry, Request
from flashmoe_science.measure.session import Earlier, Session
from flashmoe_science.measure.worker.loading import files_digest
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CorrectnessRow, DoneRow, Environment, PromiseRow, RefusalRow, Row, RunRow
from flashmoe_science.store import Run

ONE, TWO = "attn b1 h1 q1 d8 fp32", "attn b1 h1 q2 d8 fp32"
HERE = Environment(gpu=None, cpu="c", cpu_count=8, platform="p", python="3.12", torch="2.11", triton=None)


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "source_digest", lambda: "d")


def run(*rows: Row, digest: str = "d") -> Run:
    header = RunRow(
        run="r", started="2026-01-02T00:00:00Z", suite="custom", command=["flashmoe", "prove"], commit=None,
        source_digest=digest, seed=42, environment=HERE,
    )  # fmt: skip
    return Run(header, rows, Path("run-custom.jsonl"))


def done(problem: str, kernel: str | None = None) -> DoneRow:
    return DoneRow(run="r", problem=problem, kernel=kernel)


def refusal(problem: str | None, kernel: str = "k", stage: str = "correctness", voids: bool = False) -> RefusalRow:
    return RefusalRow(run="r", stage=stage, problem=problem, kernel=kernel, config="", reason=stage, voids=voids)  # type: ignore[arg-type]


def test_each_function_goes_on_where_it_was() -> None:
    earlier = Earlier.of([run(done(ONE, "a:f"), done(TWO, "a:f")), run(done(ONE, "b:f"))])
    problems = [parse_problem(ONE), parse_problem(TWO)]
    assert earlier.remaining("a:f", problems) == []
    assert earlier.remaining("b:f", problems) == problems[1:]
    assert earlier.remaining(None, problems) == problems


def test_who_was_found_wrong_before_the_cut_stays_so_and_samples_are_taken_anew() -> None:
    caught = [refusal(TWO), refusal(TWO, stage="callpath"), refusal(TWO, "b:f", "timing", voids=True)]
    dropped = [refusal(ONE), refusal(TWO, stage="timing"), refusal(None, stage="preflight")]
    once = run(done(ONE), *dropped, *caught)
    assert Earlier.of([once]).refusals == tuple(caught)
    assert Earlier.of([once, run(*caught)]).refusals == tuple(caught), "a second cut run holds them once more"


def test_a_refusal_of_one_function_stands_where_another_is_done() -> None:
    assert Earlier.of([run(done(ONE, "a:f"), refusal(ONE, "a:f"), refusal(ONE, "b:f"))]).refusals == (refusal(ONE, "b:f"),)


def test_another_source_is_another_run() -> None:
    with pytest.raises(ValueError, match=r"run-custom\.jsonl cannot be resumed: the package's source has changed"):
        Earlier.of([run(digest="e")])


def test_another_function_is_another_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1")
    (tmp_path / "rival.py").write_text("1")
    spec, rival = f"{tmp_path}/mine.py:fn", f"{tmp_path}/rival.py:fn"
    promised = run(PromiseRow(run="r", kernel=spec, source_digest=files_digest(spec, [rival])))
    Earlier.of([promised], [rival, "sdpa"])
    (tmp_path / "rival.py").write_text("2")
    with pytest.raises(ValueError, match=r"mine\.py:fn has changed since, or a function that it is compared with"):
        Earlier.of([promised], [rival])


@pytest.mark.parametrize("price", [None, 3.5])
def test_the_header_has_the_price_of_an_hour_where_one_was_given(price: float | None) -> None:
    rows = Rows()
    Session(Bench(torch.device("cpu"), None), rows, Request(price=price), lambda *step: None).begin("cpu")
    row = rows[0]
    assert isinstance(row, RunRow)
    assert row.price_per_hour == price


def test_the_errors_of_every_output_are_recorded_by_name() -> None:
    rows, problem = Rows(), parse_problem(ONE)
    session = Session(Bench(torch.device("cpu"), None), rows, Request(), lambda *step: None)
    stats = dict.fromkeys(("dq", "dk", "dv", "dsinks", "dbias"), errors())
    assert session.examined(problem, Entry("mine.py:fn", ""), Finding(stats=stats))
    assert session.examined(problem, Entry("mine.py:fn", ""), Finding()), "nothing came back to record an error of"
    assert [row.outputs for row in rows.of(CorrectnessRow)] == [stats]
