"""Whether a run is still the same run, in words where it is not, and what of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flashmoe_science.measure.resume import CannotResume, check_same, left, resume_row

from flashmoe_science.measure import resume
from flashmoe_science.measure.bench import Bench
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import DoneRow, Environment, NoteRow, PromiseRow, RefusalRow, ResumeRow, Row, RunRow
from flashmoe_science.store import Run

CPU = Bench(torch.device("cpu"), None)
HERE = Environment(
    gpu="NVIDIA H200", driver="580", cpu="c", cpu_count=8, platform="p", python="3.12", torch="2.11", triton="3.6.0",
    packages={"fa3-fwd": "0.0.3"},
)  # fmt: skip
ONE, TWO, THREE = (parse_problem(f"attn b1 h1 q{rows} d8 fp32") for rows in (1, 2, 3))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "environment", lambda bench: HERE)
    monkeypatch.setattr(resume, "source_digest", lambda: "d" * 64)
    monkeypatch.setattr(resume, "commit", lambda: "abc")


def run(*rows: Row, environment: Environment = HERE, digest: str = "d" * 64, written: float | None = None) -> Run:
    header = RunRow(
        run="r", started="2026-01-02T00:00:00+00:00", suite="custom", command=["flashmoe", "prove"], commit="abc",
        source_digest=digest, seed=42, environment=environment,
    )  # fmt: skip
    return Run(header, rows, Path("run-custom.jsonl"), written=written)


def note(problem: object) -> NoteRow:
    return NoteRow(run="r", problem=str(problem), text="begun")


def test_the_same_source_machine_and_problems_are_the_same_run() -> None:
    other_host = HERE.model_copy(update={"platform": "another kernel of Linux"})
    check_same(run(note(ONE), environment=other_host), CPU, (ONE, TWO))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "NVIDIA L4"}, "its gpu was NVIDIA L4, here NVIDIA H200"),
        ({"torch": "2.12"}, "its torch was 2.12, here 2.11"),
        ({"triton": None}, "its triton was none, here 3.6.0"),
        ({"packages": {}}, "its packages was none, here fa3-fwd 0.0.3"),
    ],
)
def test_another_machine_or_software_is_another_run(change: dict[str, object], words: str) -> None:
    with pytest.raises(CannotResume, match=r"run-custom\.jsonl cannot be gone on with: .*; start a new run") as caught:
        check_same(run(environment=HERE.model_copy(update=change)), CPU, (ONE,))
    assert words in str(caught.value)


def test_another_source_or_other_problems_are_another_run() -> None:
    with pytest.raises(
        CannotResume, match=r"the package's source is another \(its digest was eeeeeeeeeeee, here dddddddddddd\)"
    ):
        check_same(run(digest="e" * 64), CPU, (ONE,))
    with pytest.raises(CannotResume, match=r"its problems are others \(attn b1 h1 q3 d8 fp32\)"):
        check_same(run(note(ONE), note(THREE)), CPU, (ONE, TWO))


def test_a_run_that_was_stopped_is_not_gone_on_with() -> None:
    stopped = RefusalRow(run="r", stage="preflight", problem=None, kernel=None, reason="undefined symbol: _ZN3foo")
    with pytest.raises(CannotResume, match=r"it was stopped \(undefined symbol: _ZN3foo\); start a new run"):
        check_same(run(stopped), CPU, (ONE,))


def test_what_was_begun_and_not_finished_is_measured_again() -> None:
    cut = run(note(ONE), DoneRow(run="r", problem=str(ONE)), note(TWO))
    assert resume_row(cut).again == [str(TWO)]
    assert left(cut, (ONE, TWO, THREE)) == (TWO, THREE)


def test_time_counts_while_the_run_was_written_and_not_while_it_lay() -> None:
    midnight = 1767312000.0  # 2026-01-02T00:00:00Z, when the run started
    assert resume_row(run(written=midnight + 90)).seconds_before == 90
    once = ResumeRow(
        run="r", resumed="2026-01-02T10:00:00+00:00", commit=None, source_digest="d", again=[], seconds_before=90.0
    )
    assert resume_row(run(once, written=midnight + 36_000 + 5)).seconds_before == 95


def test_each_candidate_goes_on_where_it_was() -> None:
    rows = [NoteRow(run="r", problem=str(one), kernel=name, text="begun") for name in ("a:f", "b:f") for one in (ONE, TWO)]
    done = [DoneRow(run="r", problem=str(one), kernel=name) for name, one in (("a:f", ONE), ("a:f", TWO), ("b:f", ONE))]
    row = resume_row(run(*rows, *done), ("a:f", "b:f", "c:f"))
    assert (row.again, row.again_of) == ([], {"b:f": [str(TWO)]})


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ("1" * 64, "2" * 64, "a:f has changed, or a candidate that it is set against"),
        (None, "2" * 64, "it cannot be told whether a:f has changed"),
        ("1" * 64, None, "it cannot be told whether a:f has changed"),
    ],
)
def test_another_candidate_is_another_run(then: str | None, now: str | None, words: str) -> None:
    promised = PromiseRow(run="r", kernel="a:f", source_digest=then)
    check_same(run(promised), CPU, None, {"a:f": then or "1" * 64, "b:f": now} if then else {})
    with pytest.raises(CannotResume, match=words):
        check_same(run(promised), CPU, None, {"a:f": now})
