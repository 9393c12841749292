"""A kernel that a user brought, beside ours and the peers: what it promised, what was found, why it was refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.fabricated import PROBLEM, Fabricate, verdicts

from flashmoe_science.judge.report.page import Contents, page_of
from flashmoe_science.judge.report.write import as_markdown
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.summary import Candidate, candidates, groups
from flashmoe_science.records import DoneRow, PromiseRow, RefusalRow, Stage
from flashmoe_science.store import Run

LONGER = "attn b2 h8 q2048 d64 fp16"
V2 = "theirs.py:attention"
V1, OTHER = "examples/v1_attention.py:attention", "other.py:fn"


def committed() -> Run:
    """What we measured of our own before."""
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    return run.done()


def trial(name: str = "trial", kernel: str = V1, promised: float | None = 1.7, time: float = 300_000) -> Any:
    """A trial against sdpa alone, in a later run."""
    run = Fabricate(name, started="2026-02-01T00:00:00+00:00", suite="custom")
    run.rows.append(PromiseRow(run=name, kernel=kernel, speedup=promised))
    return run.control(kernel).timed(kernel, time, "sdpa", 30_000)


def only(runs: Sequence[Run]) -> Candidate:
    (found,) = candidates(runs, verdicts(runs))
    return found


@pytest.mark.parametrize(
    ("promised", "time", "told"),
    [
        (1.4, 20_000, "it kept its promise."),
        (1.7, 20_000, "measured 1.50x: promise broken."),
        (1.5, 20_000, "whether it keeps its promise is not decided."),
        (None, 20_000, None),
    ],
)
def test_a_promise_is_kept_only_by_the_whole_interval(promised: float | None, time: float, told: str | None) -> None:
    said = only([trial(promised=promised, time=time).done()]).promise
    assert said is None if told is None else str(said).endswith(told)


def test_what_a_caller_waits_is_told_beside_the_devices_time() -> None:
    """Faster by itself, and so short that its launch decides."""
    run = Fabricate("trial", suite="custom").control(V1).timed(V1, 20_000, "sdpa", 30_000)
    assert only([run.done()]).headline.startswith("faster: 1.50x (")
    both = run.control(V1, clock="eager").timed(V1, 60_000, "sdpa", 30_000, clock="eager").done()
    found = only([both])
    assert found.verdict == "undecided"
    assert found.headline.startswith("the clocks disagree: by device time faster, 1.50x (")
    assert "; by end-to-end latency slower, 0.50x (" in found.headline
    assert "by end-to-end latency slower, 0.50x" in as_markdown(page_of(Contents([JudgedRun(both)])))


def test_a_wrong_one_has_no_number_and_its_reason_comes_first() -> None:
    run = Fabricate("trial", suite="custom")
    run.rows.append(PromiseRow(run="trial", kernel=V1, speedup=1.7))
    run.refused("sanity", "no time at all", V1, LONGER).refused("correctness", "wrong in one element", V1, PROBLEM)
    runs = [committed(), run.done()]
    found = only(runs)
    assert found.verdict == "refused"
    assert found.headline == "refused: correctness: wrong in one element"
    assert found.refusals == ("correctness: wrong in one element", "sanity: no time at all")
    assert "There is no number" in str(found.promise)
    page = as_markdown(page_of(Contents([JudgedRun(runs[1])])))
    assert page.index("wrong in one element") < page.index("| problems |")


def test_one_that_could_not_be_loaded_is_there_by_its_name_alone() -> None:
    """Nothing but a refusal speaks of it, on no problem."""
    run = Fabricate("trial", suite="custom").refused("preflight", "No module named 'x'", V1, None)
    found = only([run.done()])
    assert found.verdict == "refused"
    assert found.headline == "refused: preflight: No module named 'x'"


def test_refused_ones_come_first_and_trials_do_not_replace_one_another() -> None:
    """Both in the suite 'custom', on one problem."""
    later = Fabricate("later", started="2026-03-01T00:00:00+00:00", suite="custom")
    runs = [trial().done(), later.refused("correctness", "wrong", OTHER, PROBLEM).done()]
    assert [one.name for one in candidates(runs, verdicts(runs))] == [OTHER, V1]
    found = groups(verdicts(runs))
    assert [(group.tried, [row.kernel for row in group.front]) for group in found] == [((V1,), [V1]), ((OTHER,), [OTHER])]


def test_its_rival_is_the_best_of_all_others_timed_beside_it() -> None:
    run = trial().timed(V1, 300_000, "fwd_triton", 20_000)
    rows = {row.kernel: row for row in verdicts([run.done()])}
    assert (rows[V1].rival, rows[V1].verdict) == ("fwd_triton", "slower")
    assert (rows["sdpa"].rival, rows["sdpa"].verdict) == (V1, "faster")
    assert (rows["fwd_triton"].rival, rows["fwd_triton"].verdict) == (V1, "faster")


# A candidate's rows are on disk before it may be caught: what is found later takes back what was recorded before.


def on_trial(*kernels: str) -> Any:
    """Each against sdpa, twice as fast, with a control of its own."""
    run = trial(kernel=kernels[0], promised=None, time=15_000)
    for kernel in kernels[1:]:
        run.rows.append(PromiseRow(run="trial", kernel=kernel))
        run.control(kernel).timed(kernel, 15_000, "sdpa", 30_000)
    return run


def caught(stage: Stage, problem: str = PROBLEM) -> RefusalRow:
    return RefusalRow(run="trial", stage=stage, problem=problem, kernel=V1, config="", reason="caught", voids=True)


def verdicts_on(run: Run, kernel: str = V1) -> list[tuple[str, str, str | None]]:
    return [(one.problem, one.verdict, one.reason) for one in JudgedRun(run).verdicts if one.kernel == kernel]


def cut(run: Any, *more: Any) -> Run:
    """The run as a kill left it."""
    whole: Run = run.done()
    return dataclasses.replace(whole, rows=(*whole.rows[:-1], *more))


@pytest.mark.parametrize("stage", ["timing", "sanity", "correctness"])
def test_whoever_is_caught_after_its_rows_were_written_has_no_number(stage: Stage) -> None:
    run = on_trial(V1)
    assert verdicts_on(run.done())[0][1] == "faster"
    run.rows.append(caught(stage))
    assert verdicts_on(run.done()) == [(PROBLEM, "refused", f"{stage}: caught")]


def test_whoever_is_caught_on_one_problem_is_judged_on_the_other() -> None:
    run = on_trial(V1)
    run.control(V1, problem=LONGER).timed(V1, 15_000, "sdpa", 30_000, problem=LONGER)
    run.rows.append(caught("timing", problem=LONGER))
    assert [(problem, verdict) for problem, verdict, _ in verdicts_on(run.done())] == [(PROBLEM, "faster"), (LONGER, "refused")]


def test_the_control_of_one_that_was_caught_vouches_for_nobody() -> None:
    run = on_trial(V1)
    run.timed(V2, 15_000, "sdpa", 30_000)
    assert verdicts_on(run.done(), V2)[0][1] == "faster"
    run.rows.append(caught("timing"))
    ((_, verdict, reason),) = verdicts_on(run.done(), V2)
    assert verdict == "refused"
    assert "no kernel was timed against itself" in str(reason)


def test_a_trial_that_was_cut_short_says_nothing_until_it_is_through() -> None:
    run = on_trial(V1, V2)
    through = DoneRow(run="trial", problem=PROBLEM, kernel=V1)
    ((_, verdict, reason),) = verdicts_on(cut(run, through), V2)
    assert verdict == "refused"
    assert "ended before its last check" in str(reason)
    assert verdicts_on(cut(run, through))[0][1] == "faster"
    assert verdicts_on(cut(run, through, DoneRow(run="trial", problem=PROBLEM, kernel=V2)), V2)[0][1] == "faster"
    assert verdicts_on(run.done(), V2)[0][1] == "faster", "a budget that is spent ends a run in time with what it has"
