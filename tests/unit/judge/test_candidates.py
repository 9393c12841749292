"""A kernel that a user brought, beside ours and the peers: what it promised, what was found, why it was refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.judge.fabricated import PROBLEM, Fabricate

from flashmoe_science.judge.report.page import Contents, page_of
from flashmoe_science.judge.report.write import as_markdown
from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.summary import Candidate, candidates, groups
from flashmoe_science.records import PromiseRow
from flashmoe_science.store import Run

LONGER = "attn b2 h8 q2048 d64 fp16"
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
    assert found.said == "undecided"
    assert found.headline.startswith("the clocks disagree: by device time faster, 1.50x (")
    assert "; as a caller waits slower, 0.50x (" in found.headline
    assert "as a caller waits slower, 0.50x" in as_markdown(page_of(Contents([both])))


def test_a_wrong_one_has_no_number_and_its_reason_comes_first() -> None:
    run = Fabricate("trial", suite="custom")
    run.rows.append(PromiseRow(run="trial", kernel=V1, speedup=1.7))
    run.refused("sanity", "no time at all", V1, LONGER).refused("correctness", "wrong in one element", V1, PROBLEM)
    runs = [committed(), run.done()]
    found = only(runs)
    assert found.refused
    assert found.headline == "refused: correctness: wrong in one element"
    assert found.refusals == ("correctness: wrong in one element", "sanity: no time at all")
    assert "No number can be given" in str(found.promise)
    page = as_markdown(page_of(Contents(runs[1:])))
    assert page.index("wrong in one element") < page.index("| problems |")


def test_one_that_could_not_be_loaded_is_there_by_its_name_alone() -> None:
    """Nothing but a refusal speaks of it, on no problem."""
    run = Fabricate("trial", suite="custom").refused("preflight", "No module named 'x'", V1, None)
    found = only([run.done()])
    assert found.refused
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
