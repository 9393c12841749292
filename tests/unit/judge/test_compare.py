"""Versions side by side: paired where they were sampled so, else through a rival, else without a ratio; or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.fabricated import LONGER, PROBLEM, Fabricate

from flashmoe_science.judge.compare import Cell, Place, compare
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.store import Run

GRAPH = Place("h200", PROBLEM, "graph", "cold")
Found = dict[Place, list[Cell | None]]
Call = Callable[..., tuple[int, str, str]]


def of(*runs: Run) -> Callable[..., Found]:
    """Compares words among these runs."""
    known = [JudgedRun(run) for run in runs]
    return lambda *words, **options: compare(words, known, **options)


def second(found: Found) -> Cell:
    cell = found[GRAPH][1]
    assert cell is not None
    return cell


def ratio(cell: Cell) -> float:
    assert cell.over_first is not None
    assert cell.over_first.low < cell.over_first.ratio < cell.over_first.high
    return cell.over_first.ratio


@pytest.fixture
def one_run() -> Run:
    """20 us, 16 us and 24 us; the two of ours were sampled side by side, fa3 beside each, sdpa beside fwd_triton."""
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_gluon_sm90", 16_000, "fa3", 24_000)
    return run.timed("fwd_triton", 20_000, "fwd_gluon_sm90", 16_000).timed("fwd_triton", 20_000, "sdpa", 30_000).done()


def test_two_kernels_of_one_run_are_paired(one_run: Run) -> None:
    found = of(one_run)("fwd_triton", "fwd_gluon_sm90", "sdpa")
    first, faster, slower = found[GRAPH]
    assert (first.over_first, first.how) == (None, None)
    assert (ratio(faster), faster.how, faster.judgement) == (pytest.approx(1.25, rel=0.005), "paired", "faster")
    assert (ratio(slower), slower.how, slower.judgement) == (pytest.approx(2 / 3, rel=0.005), "paired", "slower")
    assert first.as_dict()["over_sdpa"]["ratio"] == pytest.approx(1.5, rel=0.005)


def runs_of_two_days(slowdown: float = 1.0, **changes: str) -> tuple[Run, Run]:
    """Day two's kernel takes 16 us in place of 20, on a machine that ran ``slowdown`` times slower all day."""
    one = Fabricate("one", "2026-01-01T00:00:00+00:00").control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    two = Fabricate("two", "2026-01-02T00:00:00+00:00").control()
    two.timed("fwd_triton", 16_000 * slowdown, "sdpa", 30_000 * slowdown)
    environment = two.header.environment.model_copy(update=changes)
    two.header = two.header.model_copy(update={"environment": environment, "commit": "beef" * 10})
    return one.done(), two.done()


@pytest.mark.parametrize(
    "words",
    [("one", "two"), ("c0ff", "beef"), ("one:fwd_triton", "two:fwd_triton")],
    ids=["runs", "commits", "kernels of runs"],
)
def test_a_slow_day_cancels_through_the_rival_of_both_days(words: tuple[str, str]) -> None:
    found = of(*runs_of_two_days(slowdown=1.4))(*words)
    cell = second(found)
    assert (ratio(cell), cell.how, cell.judgement) == (pytest.approx(1.25, rel=0.005), "through sdpa", "faster")


def test_a_rival_of_another_version_normalises_nothing() -> None:
    cell = second(of(*runs_of_two_days(slowdown=1.4, torch="2.12"))("one", "two"))
    assert (cell.over_first, cell.how, cell.judgement) == (None, None, None)
    assert cell.verdict is not None
    assert cell.verdict.time_ns == pytest.approx(16_000 * 1.4, rel=0.005)


def test_the_same_samples_are_no_measurement(one_run: Run) -> None:
    cell = second(of(one_run)("r1", "r1:fwd_gluon_sm90"))
    assert (cell.over_first, cell.how) == (None, "the same samples")


def test_a_wrong_version_has_no_ratio_and_says_so() -> None:
    run = Fabricate().control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    run.prove(PROBLEM, "fwd_gluon_sm90", passed=False)
    run.timed("fwd_gluon_sm90", 10_000, "sdpa", 30_000)
    cell = second(of(run.done())("fwd_triton", "fwd_gluon_sm90"))
    assert (cell.over_first, cell.judgement) == (None, None)
    assert (cell.as_dict()["correct"], cell.as_dict()["error"]) == (False, 1.513)
    assert cell.verdict is not None
    assert "wrong: its output is off by" in str(cell.verdict.reason)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "NVIDIA L4"}, "have no GPU in common ('h200' and 'l4', say); only times of the same GPU are compared"),
        ({"problem": LONGER}, f"have no problem in common ('{PROBLEM}' and '{LONGER}', say); only times of the same problem"),
        ({"clock": "eager"}, "have no clock in common ('graph' and 'eager', say); only times of the same clock are compared"),
        ({"cache": "warm"}, "have no cache in common ('cold' and 'warm', say); only times of the same cache are compared"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(changes: dict[str, str], said: str) -> None:
    one = Fabricate("one").control().timed("fwd_triton", 20_000, "sdpa", 30_000)
    two = Fabricate("two", gpu=changes.pop("gpu", "NVIDIA H200")).control(**changes)
    two.timed("fwd_triton", 400_000, "sdpa", 500_000, **changes)
    with pytest.raises(ValueError, match="in common") as caught:
        of(one.done(), two.done())("one", "two")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "fwd_trition",
            "'fwd_trition' names no run, commit or kernel on record; runs: day-one, day-two; kernels: fwd_triton, sdpa",
        ),
        ("day", "'day' begins the names of 2 runs or commits: day-one, day-two; write more of it"),
        ("c0f", "names no run"),  # too little of a commit
        ("day-one:fa3", "names no run"),
        ("day-three:fa3", "names no run"),
        ("", "names no run"),
    ],
)
def test_a_word_that_names_no_version_is_told(word: str, said: str) -> None:
    known = [
        JudgedRun(Fabricate(name).control().timed("fwd_triton", 2e4, "sdpa", 3e4).done()) for name in ("day-one", "day-two")
    ]
    with pytest.raises(ValueError, match="name") as caught:
        compare([word, "sdpa"], known)
    assert said in str(caught.value)


@pytest.fixture
def folder(recorded: Callable[..., Path]) -> Path:
    """Three versions of a kernel, as a user brings them."""
    run = Fabricate().control("v1.py:forward").timed("v1.py:forward", 60_000, "sdpa", 30_000)
    run.timed("v2.py:forward", 30_000, "sdpa", 30_000).timed("v3.py:forward", 15_000, "sdpa", 30_000)
    return recorded(run)


def test_versions_stand_side_by_side_in_the_order_given(flashmoe: Call, folder: Path) -> None:
    words = ("v1.py:forward", "v2.py:forward", "v3.py:forward")
    code, out, _ = flashmoe("compare", *words, "--evidence", folder)
    assert code == 0
    assert out.startswith("h200, graph clock, cold cache")
    assert sorted(words, key=out.index) == list(words)
    assert "faster (through sdpa)" in out
    assert "\x1b" not in out


def test_json_holds_each_cell(flashmoe: Call, folder: Path) -> None:
    code, out, _ = flashmoe("compare", "v1.py:forward", "r1:v3.py:forward", "--evidence", folder, "--json")
    (row,) = json.loads(out)["rows"]
    cell = row["cells"]["r1:v3.py:forward"]
    assert code == 0
    assert (row["problem"], cell["kernel"], cell["correct"], cell["how"]) == (PROBLEM, "v3.py:forward", True, "through sdpa")
    assert cell["over_first"]["ratio"] == pytest.approx(4, rel=0.01)
    assert cell["over_sdpa"]["ratio"] == pytest.approx(2, rel=0.01)
