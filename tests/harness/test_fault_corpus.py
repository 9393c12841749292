"""Every fault of docs/faults.md, planted in a user's function and in a kernel of ours: refused, in words that name it."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.harness.listed_faults import (
    FORGED,
    GPU,
    HARMLESS,
    NOT_IN_OURS,
    PLANTED,
    SLOW,
    SWEPT,
    SWEPT_ON_GPU,
    TIMED,
    WORDS_IN_OURS,
    WRONG,
    Fault,
    fault,
)
from tests.harness.rows import Rows

from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.measure import clocks, compare
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.function_run import FunctionRun, run_functions
from flashmoe_science.measure.request import Request
from flashmoe_science.measure.sandbox import checks
from flashmoe_science.measure.session import Outcome, Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.processes import processors
from flashmoe_science.records import CorrectnessRow, RunRow, TimingRow
from flashmoe_science.store import Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
WATCHDOG_S = 30.0
ONE_MORE = "attn b1 h2 q9 d16 fp32"


def measured(bench: Bench, faults: Sequence[Fault], watchdog_s: float = WATCHDOG_S, *more: str) -> tuple[Outcome, Rows]:
    """One run of the functions, all on the first one's problem, and on more."""
    one, rows = faults[0], Rows()
    request = Request(
        targets=tuple(each.spec for each in faults),
        against=("sdpa",) if str(one.problem).startswith("attn ") else (),
        quick=True,
        watchdog_s=watchdog_s,
        command=("flashmoe", "prove"),
    )
    problems = None if one.problem is None else tuple(map(parse_problem, (one.problem, *more)))
    return run_functions(Session(bench, rows, request, lambda *step: None), problems), rows


def chunks(faults: Sequence[Fault], size: int, marks: Sequence[pytest.MarkDecorator] = ()) -> list[object]:
    """The faults by problem, a few at a time: a run's rivals and oracle are started once."""
    by_problem: dict[str | None, list[Fault]] = {}
    for one in faults:
        by_problem.setdefault(one.problem, []).append(one)
    found = [every[first : first + size] for every in by_problem.values() for first in range(0, len(every), size)]
    return [pytest.param(some, id=" ".join(one.name for one in some), marks=marks) for some in found]


def amiss(one: Fault, outcome: Outcome, rows: Rows) -> list[str]:
    """What the run did not do as it must: refuse the fault, in its words, at its stage; give no number of it."""
    refused = rows.refusals(one.spec)
    reasons = "; ".join(reason for _, reason in refused)
    found = [f"{one.name}: {words!r} is not in: {reasons}" for words in one.words if not re.search(words, reasons)]
    if not any(re.fullmatch(one.stage, stage) for stage, _ in refused):
        found.append(f"{one.name}: refused at {[stage for stage, _ in refused]}, not at {one.stage}")
    header, *rest = rows
    assert isinstance(header, RunRow)
    verdicts = {verdict.verdict for verdict in JudgedRun(Run(header, tuple(rest))).verdicts if verdict.kernel == one.spec}
    if verdicts != {"refused"} and not one.has_a_number:
        found.append(f"{one.name}: its verdicts are {verdicts}")
    if one.spec not in "; ".join((*outcome.wrong, *outcome.untrustworthy, outcome.stopped or "")):
        found.append(f"{one.name}: the outcome does not name it")
    return found


def assert_named(faults: Sequence[Fault], outcome: Outcome, rows: Rows) -> None:
    assert [words for one in faults for words in amiss(one, outcome, rows)] == []
    assert outcome.exit_code != ExitCode.GOOD


@pytest.fixture(autouse=True)
def _no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fault is refused on its own problem, not on the contract's sweep."""
    monkeypatch.setattr(FunctionRun, "_swept", lambda self: None)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    return Bench(torch.device("cpu"), None)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's other work does to a time is no fault of a kernel's: the checks that find it are left out."""
    monkeypatch.setattr(compare, "impossible", lambda samples, floor, expected: clocks.impossible(samples, floor, None))
    monkeypatch.setattr(checks, "clock_mismatch", lambda sampler, ping: None)


def in_ours(one: Fault) -> bool:
    """Whether test_a_fault_in_a_kernel_of_ours_is_caught_by_name plants it: not what a kernel of ours cannot have, or what only
    the sandbox of a child looks for."""
    return one.stage == "correctness" and one.name not in NOT_IN_OURS


# The same exam in a child finds what is planted in a kernel of ours, some of it in other words.
REDUNDANT = [pytest.mark.slow, pytest.mark.redundant]
OTHER_WORDS = [one for one in WRONG if in_ours(one) and one.name in WORDS_IN_OURS]
SAME_WORDS = [one for one in WRONG if in_ours(one) and one.name not in WORDS_IN_OURS]


@pytest.mark.parametrize(
    "faults",
    [
        *chunks([one for one in WRONG if not in_ours(one)], 9),
        *chunks(OTHER_WORDS, 9, [pytest.mark.slow]),
        *chunks(SAME_WORDS, 9, REDUNDANT),
    ],
)
def test_a_wrong_function_is_caught_by_name(cpu: Bench, faults: Sequence[Fault]) -> None:
    outcome, rows = measured(cpu, faults)
    assert_named(faults, outcome, rows)
    assert rows.of(TimingRow) == []


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "faults",
    [
        *chunks([one for one in TIMED if not in_ours(one)], 5, [pytest.mark.slow]),
        *chunks([one for one in TIMED if in_ours(one)], 5, REDUNDANT),
    ],
)
def test_a_function_that_cheats_the_clock_is_caught_by_name(cpu: Bench, faults: Sequence[Fault]) -> None:
    assert_named(faults, *measured(cpu, faults))


@pytest.mark.slow
def test_a_function_that_forges_its_samples_is_caught_by_another_clock(cpu: Bench) -> None:
    assert_named([FORGED], *measured(cpu, [FORGED]))


def test_a_function_that_hangs_is_caught_by_name_and_not_asked_the_next_problem(cpu: Bench) -> None:
    others = os.getloadavg()[0] / processors()  # what a start takes longer by where others work too
    outcome, rows = measured(cpu, SLOW, 6.0 * max(1.0, others), ONE_MORE)
    assert_named(SLOW, outcome, rows)
    assert rows.refusals(SLOW[0].spec)[-1][1] == f"not asked: it hung on '{SLOW[0].problem}'"


@pytest.mark.gpu
@pytest.mark.parametrize("one", GPU, ids=lambda one: one.name)
def test_a_fault_on_a_gpu_is_caught_by_name(one: Fault) -> None:
    assert_named([one], *measured(bench_here(), [one]))


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
def test_a_function_that_prints_much_or_leaves_a_thread_waiting_is_no_worse_for_it(cpu: Bench) -> None:
    """That one that moves a random state is noted, and no worse for it, is in tests/unit/cli/test_check.py."""
    faults = [fault(name, "") for name in sorted(HARMLESS - {"moves_the_random_state"})]
    outcome, rows = measured(cpu, faults)
    assert [row for one in faults for row in rows.refusals(one.spec)] == []
    passed = {row.kernel: row.passed for row in rows.of(CorrectnessRow) if ":" in row.kernel}
    assert passed == {one.spec: True for one in faults}
    assert outcome.exit_code == ExitCode.GOOD


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
def test_a_function_that_remembers_what_it_was_asked_is_caught_or_gains_nothing(cpu: Bench) -> None:
    """It computes what its rival does, and looks at its inputs besides: anything but slower would be an answer that it kept.
    Where no timed sample meets the same values twice, there is nothing to be caught at."""
    one = fault("remembers_contents", "timing", "remembers results")
    outcome, rows = measured(cpu, [one])
    beside = [row for row in rows.of(TimingRow) if row.rival == "sdpa"]
    if not beside:
        assert_named([one], outcome, rows)
    for row in beside:
        assert statistics.median(theirs / own for own, theirs in zip(row.a, row.b, strict=True)) < 1.1


# What can be planted in a kernel of ours. The last one's thread goes on in the process of all.
IN_OURS = sorted(
    filter(in_ours, (*WRONG, *TIMED)),
    key=lambda one: one.name == "burns_the_other_cores",
)


def test_a_fault_in_a_kernel_of_ours_is_caught_by_name() -> None:
    """All in one process, whose imports take longer than a third of the faults."""
    program = [sys.executable, "-m", "tests.harness.planted_in_ours", *(one.name for one in IN_OURS)]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for one in IN_OURS:
        stages, reasons = zip(*found[one.name]["refusals"], strict=True) if found[one.name]["refusals"] else ((), ())
        assert set(stages) == {"correctness"}, (one.name, found[one.name])
        for words in WORDS_IN_OURS.get(one.name, one.words):
            assert re.search(words, "; ".join(reasons)), (one.name, words, reasons)
        assert found[one.name]["numbers"] == 0, one.name


def test_every_fault_is_on_the_page_and_planted() -> None:
    faults = (*WRONG, *TIMED, FORGED, *SLOW, *GPU, *SWEPT, *SWEPT_ON_GPU)
    listed = {one.name for one in faults} | HARMLESS | {"remembers_contents", "window_of_the_first_call"}
    assert listed == set(PLANTED)
    assert set(NOT_IN_OURS) <= listed
    kernels = PAGE.read_text(encoding="utf-8").split("## Of a measurement")[0]
    assert set(re.findall(r"`([a-z0-9_/]+)`", kernels)) >= listed


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"
