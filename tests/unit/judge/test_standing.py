"""Which run counts for a place, and that all who choose among runs choose alike; draws are a suite of their own."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.fabricated import PROBLEM, Fabricate, verdicts

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.compare import compare
from flashmoe_science.judge.gate.claims import Claim, judge_claim
from flashmoe_science.judge.gate.ratchet import check, raised
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.summary import disagreements, groups
from flashmoe_science.measure.promote import promote

DRAWN = "attn b3 h6 hk2 q700 d80 fp16"


def day(name: str, time: float, quick: bool = False, **more: Any) -> JudgedRun:
    run = Fabricate(name, started=f"2026-01-{name}T00:00:00+00:00", quick=quick, **more)
    return JudgedRun(run.control().timed("fwd_triton", time, "sdpa", 30_000).done())


@pytest.fixture
def days() -> list[JudgedRun]:
    """A full run, a later full run, and a still later quick one."""
    return [day("01", 25_000), day("02", 20_000), day("03", 10_000, quick=True)]


def test_a_later_full_run_counts_and_a_quick_one_does_not_replace_it(days: list[JudgedRun]) -> None:
    assert {row.run for row in standing(days)} == {"02"}
    assert {row.run for row in standing(days[::-1])} == {"02"}
    assert {row.run for row in standing(days[2:])} == {"03"}  # where there is no other


def test_a_run_that_was_cut_in_a_problem_does_not_replace_one_that_finished_it(days: list[JudgedRun]) -> None:
    run = Fabricate("04", started="2026-01-04T00:00:00+00:00").control().timed("fwd_triton", 5_000, "sdpa", 30_000)
    cut = JudgedRun(run.done(cut=True))
    assert {row.run for row in standing([*days[:2], cut])} == {"02"}
    assert {row.run for row in standing([cut])} == {"04"}  # where there is no other
    assert all(row.as_dict()["unfinished"] for row in cut.verdicts)


def test_the_table_the_ratchet_and_a_comparison_take_the_same_run(
    days: list[JudgedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flashmoe_science.measure.promote.first_guess", lambda problem, gpu: "fwd_triton"
    )  # which alone was measured
    every = [row for one in days for row in one.verdicts]
    assert [entry["run"] for entry in promote(every, GPUS)] == ["02"]
    (new,) = check([], days, days)
    assert new.now is not None
    assert new.now.run == "02"
    ((cell, _),) = compare(["fwd_triton", "sdpa"], days).values()
    assert cell.verdict is not None
    assert cell.verdict.run == "02"


@pytest.fixture
def drawn() -> list[JudgedRun]:
    """The suite, and problems drawn around it, on one of which we are slower."""
    suite = Fabricate("suite", suite="long").control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    draw = Fabricate("draw", suite="long-draw")
    for problem, time in ((PROBLEM, 20_000), (DRAWN, 40_000)):
        draw.control(problem=problem).timed("fwd_triton", time, "sdpa", 30_000, problem=problem)
    return [JudgedRun(suite.done()), JudgedRun(draw.done())]


def test_a_draw_stands_beside_its_suite_and_not_in_its_place(drawn: list[JudgedRun]) -> None:
    counts = {group.suite: (group.counts["faster"], group.counts["slower"]) for group in groups(standing(drawn))}
    assert counts == {"long": (1, 0), "long-draw": (1, 1)}


def test_a_claim_may_be_on_the_draw(drawn: list[JudgedRun]) -> None:
    claim = {
        "id": "c", "text": "", "gpu": "h200", "clock": "graph", "problems": 2, "statistic": "geomean", "at_least": 1.0,
    }  # fmt: skip
    stand = standing(drawn)
    on_draw = judge_claim(Claim.model_validate(claim | {"suite": "long-draw"}), stand, drawn)
    assert on_draw.measured == pytest.approx((1.5 * 0.75) ** 0.5, rel=0.01)
    on_suite = judge_claim(Claim.model_validate(claim | {"suite": "long", "problems": 1}), stand, drawn)
    assert on_suite.measured == pytest.approx(1.5, rel=0.01)


def test_a_draw_moves_neither_the_table_nor_the_ratchet(drawn: list[JudgedRun]) -> None:
    """Its problems are never measured again: what is chosen and kept of them could not be held."""
    assert promote(standing(drawn), GPUS) == promote(standing(drawn[:1]), GPUS)
    kept = raised([], check([], drawn, drawn))
    assert [(one.problem, one.run) for one in kept] == [(PROBLEM, "suite")]


@pytest.mark.parametrize(("eager", "said"), [(0.8, 2), (1.0, 0), (1.2, 0)])
def test_it_is_said_where_the_clocks_say_the_opposite(eager: float, said: int) -> None:
    """Faster than sdpa by device time, by 1.5; and by end-to-end latency, by so much."""
    run = Fabricate().control().control(clock="eager").timed("fwd_triton", 20_000, "sdpa", 30_000)
    found = disagreements(verdicts([run.timed("fwd_triton", 40_000, "sdpa", 40_000 * eager, clock="eager").done()]))
    assert len(found) == said
    words = "the clocks disagree: faster by device time (1.50x of sdpa), slower by end-to-end latency (0.80x of sdpa)"
    assert not found or found[0] == f"fwd_triton on {PROBLEM}: {words}"
