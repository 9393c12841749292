"""A candidate's rows are on disk before it may be caught: what is found later takes back what was recorded before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.judge.fabricated import PROBLEM, Fabricate

from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.records import DoneRow, PromiseRow, RefusalRow
from flashmoe_science.store import Run

LONGER = "attn b2 h8 q2048 d64 fp16"
MINE, THEIRS = "mine.py:attention", "theirs.py:attention"


def timed(*kernels: str, problem: str = PROBLEM) -> Any:
    """Each on trial against sdpa, twice as fast, with a control of its own."""
    run = Fabricate("trial", suite="custom")
    for kernel in kernels:
        run.rows.append(PromiseRow(run="trial", kernel=kernel))
        run.control(kernel, problem=problem).timed(kernel, 15_000, "sdpa", 30_000, problem=problem)
    return run


def caught(stage: str, voids: bool, problem: str = PROBLEM) -> RefusalRow:
    return RefusalRow(run="trial", stage=stage, problem=problem, kernel=MINE, config="", reason="caught", voids=voids)  # type: ignore[arg-type]


def said(run: Run, kernel: str = MINE) -> list[tuple[str, str, str | None]]:
    return [(one.problem, one.verdict, one.reason) for one in verdicts_of(run) if one.kernel == kernel]


def cut(run: Any, *more: Any) -> Run:
    """The run as a kill left it."""
    whole: Run = run.done()
    return dataclasses.replace(whole, rows=(*whole.rows[:-1], *more))


@pytest.mark.parametrize("stage", ["timing", "sanity", "correctness"])
def test_whoever_is_caught_after_its_rows_were_written_has_no_number(
    stage: str,
) -> None:
    run = timed(MINE)
    assert said(run.done())[0][1] == "faster"
    run.rows.append(caught(stage, voids=True))
    assert said(run.done()) == [(PROBLEM, "refused", f"{stage}: caught")]


def test_whoever_is_caught_on_one_problem_is_judged_on_the_other() -> None:
    run = timed(MINE)
    run.control(MINE, problem=LONGER).timed(MINE, 15_000, "sdpa", 30_000, problem=LONGER)
    run.rows.append(caught("timing", voids=True, problem=LONGER))
    assert [(problem, verdict) for problem, verdict, _ in said(run.done())] == [(PROBLEM, "faster"), (LONGER, "refused")]


def test_the_control_of_one_that_was_caught_vouches_for_nobody() -> None:
    run = timed(MINE)
    run.rows.append(PromiseRow(run="trial", kernel=THEIRS))
    run.timed(THEIRS, 15_000, "sdpa", 30_000)
    assert said(run.done(), THEIRS)[0][1] == "faster"
    run.rows.append(caught("timing", voids=True))
    ((_, verdict, reason),) = said(run.done(), THEIRS)
    assert verdict == "refused"
    assert "no kernel was timed against itself" in str(reason)


def test_a_trial_that_was_cut_short_says_nothing_until_it_is_through() -> None:
    run = timed(MINE, THEIRS)
    through = DoneRow(run="trial", problem=PROBLEM, kernel=MINE)
    ((_, verdict, reason),) = said(cut(run, through), THEIRS)
    assert verdict == "refused"
    assert "cut short" in str(reason)
    assert said(cut(run, through))[0][1] == "faster"
    assert said(cut(run, through, DoneRow(run="trial", problem=PROBLEM, kernel=THEIRS)), THEIRS)[0][1] == "faster"
    assert said(run.done(), THEIRS)[0][1] == "faster", "a budget that is spent ends a run in time with what it has"
