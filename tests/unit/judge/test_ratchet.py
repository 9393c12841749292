"""The ratchet fails on a proven regression and on nothing else, rises on a proven gain, and falls only when it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.fabricated import LONGER, PROBLEM, Fabricate

from flashmoe_science.judge.gate.entries import EntryError
from flashmoe_science.judge.gate.ratchet import Check, Kept, check, lowered, raised, read_ratchet, write_ratchet
from flashmoe_science.judge.standing import JudgedRun

Call = Callable[..., tuple[int, str, str]]


def outcomes(checks: Sequence[Check]) -> list[str]:
    return [one.outcome for one in checks]


@pytest.fixture
def day() -> Callable[..., JudgedRun]:
    """A day's run, in which fwd_triton takes ``time`` ns beside sdpa's 30 us on each problem."""

    def of(
        number: int, time: float = 20_000, problems: Sequence[str] = (PROBLEM,), quick: bool = False, **changes: Any
    ) -> JudgedRun:
        run = Fabricate(f"day{number}", f"2026-01-{number:02d}T00:00:00+00:00", quick=quick)
        for problem in problems:
            run.control(problem=problem).timed("fwd_triton", time, "sdpa", 30_000, problem=problem, **changes)
        return JudgedRun(run.done())

    return of


@pytest.fixture
def kept(day: Callable[..., JudgedRun]) -> list[Kept]:
    """What day 1 left: a ratio of 1.5."""
    return raised([], check([], [day(1)], []))


def test_what_is_new_is_kept_with_all_that_it_rests_on(kept: list[Kept]) -> None:
    (one,) = kept
    assert one.ratio == pytest.approx(1.5, rel=0.005)
    assert one.low < one.ratio < one.high
    assert (one.gpu, one.problem, one.clock, one.cache, one.subject) == ("h200", PROBLEM, "graph", "cold", "ours")
    assert (one.rival, one.kernel, one.run, one.torch, one.accepted) == ("sdpa", "fwd_triton", "day1", "2.11", None)


@pytest.mark.parametrize(
    ("time", "outcome"), [(20_000, "held"), (20_200, "held"), (21_500, "regressed"), (19_000, "gained"), (40_000, "regressed")]
)
def test_a_later_day_is_held_to_it(day: Callable[..., JudgedRun], kept: list[Kept], time: float, outcome: str) -> None:
    assert outcomes(check(kept, [day(2, time)], [])) == [outcome]


def test_noise_neither_fails_nor_raises(day: Callable[..., JudgedRun]) -> None:
    """Six days of 36 equal problems with 1% of noise: not one alarm and not one gain in 216 rows."""
    problems = [f"attn b1 h8 q{512 + size} d64 fp16" for size in range(36)]
    kept = raised([], check([], [day(1, problems=problems, noise=0.01)], []))
    assert len(kept) == 36
    for number in range(2, 8):
        checks = check(kept, [day(number, problems=problems, noise=0.01)], [])
        assert set(outcomes(checks)) == {"held"}


def test_a_proven_gain_raises_and_a_regression_lowers_nothing(day: Callable[..., JudgedRun], kept: list[Kept]) -> None:
    gained = raised(kept, check(kept, [day(2, 15_000)], []))
    assert (gained[0].run, gained[0].ratio) == ("day2", pytest.approx(2, rel=0.005))
    assert raised(gained, check(gained, [day(3, 20_000)], [])) == gained


def test_a_quick_run_can_fail_but_keeps_nothing(day: Callable[..., JudgedRun], kept: list[Kept]) -> None:
    assert raised([], check([], [day(2, quick=True)], [])) == []
    assert raised(kept, check(kept, [day(2, 10_000, quick=True)], [])) == kept
    assert outcomes(check(kept, [day(2, 25_000, quick=True)], [])) == ["regressed"]
    assert outcomes(check(kept, [day(2, quick=False), day(3, 25_000, quick=True)], [])) == ["held"]  # a full run speaks first


def test_a_problem_that_has_no_number_is_named_with_the_reason(day: Callable[..., JudgedRun], kept: list[Kept]) -> None:
    wrong = Fabricate("day2", "2026-01-02T00:00:00+00:00").control("fwd_gluon_sm90")
    wrong.prove(PROBLEM, "fwd_triton", passed=False)
    wrong.timed("fwd_triton", 10_000, "sdpa", 30_000)
    (one,) = check(kept, [JudgedRun(wrong.done())], [])
    assert (one.outcome, one.now) == ("refused", None)
    assert "wrong: its output is off by" in str(one.why)
    without = Fabricate("day2").control().timed("fwd_triton", 20_000, "fa3", 30_000)
    (one,) = check(kept, [JudgedRun(without.done())], [])
    assert (one.outcome, one.why) == ("refused", "sdpa was not timed beside fwd_triton")
    absent, new = check(kept, [day(2, problems=[LONGER])], [])
    assert (absent.outcome, absent.key.problem, absent.why) == ("absent", PROBLEM, "no run here measured it")
    assert (new.outcome, new.key.problem, new.why) == ("new", LONGER, None)


def test_a_run_that_was_not_asked_for_the_rival_says_nothing_of_it(day: Callable[..., JudgedRun], kept: list[Kept]) -> None:
    """`flashmoe prove --against fa3` measures ours again, and the run before it stays the one that speaks of sdpa."""
    later = Fabricate("day3", "2026-01-03T00:00:00+00:00").control().timed("fwd_triton", 29_000, "fa3", 30_000)
    runs = [day(1), day(2, 19_000), JudgedRun(later.done())]
    (one,) = check(kept, runs, [])
    assert (one.outcome, one.now and one.now.run) == ("gained", "day2")
    wrong = Fabricate("day4", "2026-01-04T00:00:00+00:00").control("fwd_gluon_sm90")
    wrong.prove(PROBLEM, "fwd_triton", passed=False)
    wrong.timed("fwd_triton", 29_000, "fa3", 30_000)
    (one,) = check(kept, [*runs, JudgedRun(wrong.done())], [])
    assert one.outcome == "refused"
    assert "wrong: its output is off by" in str(one.why)


@pytest.mark.parametrize(
    ("clock", "time", "outcome"),
    [
        ("graph", 23_000, "regressed"), ("graph", 20_300, "held"), ("graph", 19_700, "held"), ("graph", 17_500, "gained"),
        ("eager", 23_000, "held"), ("eager", 26_000, "regressed"), ("eager", 17_500, "held"), ("eager", 15_500, "gained"),
    ],
)  # fmt: skip
def test_a_hosts_own_moves_are_no_regression_and_no_gain(
    day: Callable[..., JudgedRun], clock: str, time: float, outcome: str
) -> None:
    """Two peers' eager times move by a fifth against each other from run to run, where nobody changed them."""
    kept = raised([], check([], [day(1, clock=clock)], []))
    assert outcomes(check(kept, [day(2, time, clock=clock)], [])) == [outcome]


def test_a_lowering_keeps_its_reason_and_what_was_before(day: Callable[..., JudgedRun], kept: list[Kept]) -> None:
    checks = check(kept, [day(2, 25_000)], [])
    (one,) = lowered(kept, checks, PROBLEM, "exact now")
    assert one.ratio == pytest.approx(1.2, rel=0.005)
    assert one.accepted is not None
    assert (one.accepted.reason, one.accepted.from_ratio, one.accepted.from_run) == ("exact now", kept[0].ratio, "day1")
    with pytest.raises(match="has not regressed; there is nothing to lower"):
        lowered(kept, checks, LONGER, "x")
    with pytest.raises(match="only a quick run measured"):
        lowered(kept, check(kept, [day(2, 25_000, quick=True)], []), PROBLEM, "x")


def test_an_entry_is_held_to_the_run_that_it_rests_on(day: Callable[..., JudgedRun], kept: list[Kept]) -> None:
    run = day(1)
    forged = [kept[0].model_copy(update={"ratio": 1.9, "low": 1.8, "high": 2.0})]
    with pytest.raises(match=r"says 1\.9; run day1 gives 1\.49"):
        check(forged, [run], [run])
    with pytest.raises(match="rests on run day1, which has no such pair to believe"):
        check([kept[0].model_copy(update={"kernel": "fwd_gluon_sm90"})], [run], [run])
    modest = [kept[0].model_copy(update={"low": 0.1})]  # so that nothing would ever be a regression: the samples say otherwise
    assert outcomes(check(modest, [day(2, 25_000)], [run])) == ["regressed"]


def test_the_file_is_sorted_and_holds_an_entry_a_line(day: Callable[..., JudgedRun], tmp_path: Path) -> None:
    kept = raised([], check([], [day(1, problems=[PROBLEM, LONGER])], []))
    path = tmp_path / "deep" / "ratchet.json"
    write_ratchet(path, kept)
    lines = path.read_text().splitlines()
    assert lines[0] == '{"schema": 1, "entries": ['
    assert [json.loads(line.rstrip(","))["problem"] for line in lines[1:-1]] == [LONGER, PROBLEM]
    assert sorted(read_ratchet(path), key=lambda one: one.key) == sorted(kept, key=lambda one: one.key)
    assert list(path.parent.iterdir()) == [path]


ENTRY = (
    '{"gpu": "h200", "problem": "attn b2 h8 q512 d64 fp16", "clock": "graph", "cache": "cold", "subject": "ours", '
    '"rival": "sdpa", "ratio": 1.5, "low": 1.4, "high": 1.6, "kernel": "fwd_triton", "config": "", "run": "r1", "torch": null}'
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON, or torn"),
        ("[]", "holds list; it must hold schema, entries and nothing else"),
        ('{"schema": 2, "entries": []}', "has schema 2; it must be 1"),
        ('{"schema": 1, "entries": [{}]}', "entries 1: gpu: it is not given, and is needed"),
        (f'{{"schema": 1, "entries": [{ENTRY}, {ENTRY}]}}', "entries 2 is given twice"),
        (f'{{"schema": 1, "entries": [{ENTRY.replace("1.4", "1.7")}]}}', "ratio is 1.5, which is not within 1.7 to 1.6"),
        ('{"schema": 0, "entries": []}', "has schema 0; it must be 1"),
        (
            f'{{"schema": 1, "entries": [{ENTRY.replace("1.6", "1e300")}]}}',
            "high: Input should be less than or equal to 1000000000000",
        ),
        (f'{{"schema": 1, "entries": [{ENTRY.replace("q512 d64", "d64 q512")}]}}', f"it must be written '{PROBLEM}'"),
        (f'{{"schema": 1, "entries": [{ENTRY.replace("b2 h8", "b2")}]}}', "lacks h<n>"),
    ],
)
def test_a_file_that_cannot_be_believed_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ratchet.json"
    path.write_text(text)
    with pytest.raises(EntryError) as caught:
        read_ratchet(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def runs(recorded: Callable[..., Path], tmp_path: Path) -> Callable[[float], Path]:
    """A folder with one run, in which fwd_triton takes that many ns."""

    def of(time: float) -> Path:
        run = Fabricate(f"run{time:.0f}", f"2026-01-01T00:00:{time / 1000:02.0f}+00:00")
        return recorded(run.control().timed("fwd_triton", time, "sdpa", 30_000), folder=tmp_path / f"reports{time:.0f}")

    return of


def test_the_command_fails_on_a_regression_until_it_is_accepted(
    flashmoe: Call, runs: Callable[[float], Path], tmp_path: Path
) -> None:
    file = tmp_path / "ratchet.json"
    code, out, _ = flashmoe("ratchet", "--runs", runs(20_000), "--file", file, "--update")
    assert (code, "1 new" in out, "1 of 1 entries changed" in out) == (0, True, True)
    worse = runs(25_000)
    code, out, _ = flashmoe("ratchet", "--runs", worse, "--file", file)
    assert code == 1
    assert out.startswith(f"regressed  {PROBLEM} (h200, graph clock, cold cache): 1.")
    assert flashmoe("ratchet", "--runs", worse, "--file", file, "--update")[0] == 1
    words = ("ratchet", "--runs", worse, "--file", file, "--accept", PROBLEM, "--reason", "exact  now")
    code, out, _ = flashmoe(*words, "--json")
    assert (code, json.loads(out)["entries"][0]["kept"]["accepted"]["reason"]) == (0, "exact now")
    assert flashmoe("ratchet", "--runs", worse, "--file", file)[0] == 0
    code, out, _ = flashmoe("ratchet", "--runs", runs(15_000), "--file", file, "--update", "--json")
    (one,) = json.loads(out)["entries"]
    assert (code, one["outcome"], one["kept"]["run"], one["before"]["run"]) == (0, "gained", "run15000", "run25000")


def test_a_gate_that_holds_nothing_is_not_green(
    flashmoe: Call, runs: Callable[[float], Path], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "ratchet.json"
    assert flashmoe("ratchet", "--runs", runs(20_000), "--file", file, "--update")[0] == 0
    elsewhere = Fabricate("l4", gpu="NVIDIA L4").control().timed("fwd_triton", 200_000, "sdpa", 300_000)
    folder = recorded(elsewhere, folder=tmp_path / "l4")
    code, out, _ = flashmoe("ratchet", "--runs", folder, "--file", file)
    assert (code, "1 absent, 1 new" in out, "no kept ratio was measured here" in out) == (3, True, True)
    assert flashmoe("ratchet", "--runs", folder, "--file", file, "--update")[0] == 0
    assert flashmoe("ratchet", "--runs", folder, "--file", file)[0] == 0
