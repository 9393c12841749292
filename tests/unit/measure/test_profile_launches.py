"""Looking at call paths from another process: what it saw, what it died on, and that nothing else is lost with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.harness.rows import Rows

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.measure import channel
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.channel import Died, Failed
from flashmoe_science.measure.on_problem import OnProblem, ProfilerUnavailable, by_name, profile_launches
from flashmoe_science.measure.request import Entry, Request
from flashmoe_science.measure.session import BudgetSpent, Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CallPathRow, SeenLaunch

PROBLEMS = [parse_problem(f"attn b1 h1 q{n} d8 bf16") for n in (1, 2, 3)]
TODO = [(problem, [("sdpa", "")]) for problem in PROBLEMS]
LISTS = "problems rivals sweep distributions variants everywhere sweep_variants edge_variants calls"
OPENED = {name: [] for name in LISTS.split()}
OPENED |= {"contract": "attention", "built_in": True, "promises": {}}
LAUNCH = {"name": "fwd", "grid": [1, 1, 1], "block": [128, 1, 1], "shared_bytes": 0}


class Profiling:
    """A child that sees one launch of each call, dies on ``deadly`` problems and cannot begin ``failing`` ones."""

    started: list[Profiling]
    deadly: set[str]
    failing: set[str]
    unavailable: str | None

    def __init__(self, module: str, watchdog_s: float, settings: None) -> None:
        self.alive, self.asked, self.problem = True, [], ""
        self.started.append(self)

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.asked.append(do)
        if do == "problem":
            self.problem = what["text"]
            if self.problem in self.failing:
                raise Failed("ValueError: no")
        if do == "open":
            return OPENED
        if do != "launches":
            return {}
        if self.problem in self.deadly:
            self.alive = False
            raise Died("it crashed: SIGSEGV")
        if self.unavailable:
            return {"unavailable": self.unavailable}
        return {"launches": [[name, config, [[LAUNCH], [LAUNCH]]] for name, config in what["who"]]}

    def drain(self) -> tuple[list[str], list[str]]:
        return [], []

    def close(self) -> None:
        self.alive = False


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> type[Profiling]:
    Profiling.started, Profiling.deadly, Profiling.failing, Profiling.unavailable = [], set(), set(), None
    monkeypatch.setattr(channel, "Child", Profiling)
    return Profiling


def seen(processes: int = 1) -> tuple[set[str], list[int]]:
    """The problems that were seen, and the order in which they were told of."""
    told: list[str] = []
    found = profile_launches(None, "attention", TODO, 42, 60.0, told.append, processes)
    assert all(len(calls) == 2 and calls[0][0].name == "fwd" for calls in found.values())
    return {problem for problem, _, _ in found}, [int(text.split()[2]) for text in told[1:]]


def test_every_problem_is_seen_in_one_process_that_is_closed(children: type[Profiling]) -> None:
    assert seen() == (set(map(str, PROBLEMS)), [1, 2, 3])
    (child,) = children.started
    assert child.asked.count("open") == 1
    assert not child.alive


def test_a_problem_that_takes_the_process_down_costs_only_itself(children: type[Profiling]) -> None:
    children.deadly = {str(PROBLEMS[1])}
    assert seen() == ({str(PROBLEMS[0]), str(PROBLEMS[2])}, [1, 2, 3])
    assert len(children.started) == 2


def test_a_profiler_that_sees_nothing_ends_it(children: type[Profiling]) -> None:
    children.unavailable = "the profiler sees no kernels"
    with pytest.raises(ProfilerUnavailable, match="the profiler sees no kernels"):
        seen()
    assert not children.started[0].alive


def test_processes_side_by_side_share_the_problems_and_are_closed(children: type[Profiling]) -> None:
    children.deadly = {str(PROBLEMS[0])}
    assert seen(processes=2) == ({str(PROBLEMS[1]), str(PROBLEMS[2])}, [1, 2, 3])
    assert 2 <= len(children.started) <= 3
    assert not any(child.alive for child in children.started)


def test_what_a_step_raises_ends_it_with_every_process_closed(children: type[Profiling]) -> None:
    def step(text: str) -> None:
        if "1 of" in text:
            raise BudgetSpent

    with pytest.raises(BudgetSpent):
        profile_launches(None, "attention", TODO, 42, 60.0, step, 2)
    assert not any(child.alive for child in children.started)


def test_a_call_of_thousands_of_launches_is_recorded_by_name() -> None:
    """A loop over 128 experts: 1.2 MB of record where each launch had its own entry."""
    problem, rows = parse_problem("attn b1 h1 q4 d4 fp16"), Rows()
    names = [f"kernel_{index % 100}" for index in range(1900)]
    launched = [launch(name, blocks) for blocks, name in enumerate(names, 1)]
    session = Session(Bench(torch.device("cpu"), gpu_named("h200")), rows, Request(), lambda *step: None)
    on = OnProblem(session, problem, *[None] * 3, 0, {(str(problem), "", ""): [launched, launched]}, "")  # type: ignore[arg-type]
    assert on.keeps_its_promise(Entry("mine.py:fn", ""), ())
    (row,) = rows.of(CallPathRow)
    assert [(one.name, one.count, one.grid) for one in row.launches] == [
        (f"kernel_{index}", 19, (1801 + index, 1, 1)) for index in range(64)
    ]
    assert len(row.model_dump_json()) < 20_000
    assert sum(one.count for one in by_name(launched)) == len(launched)


def launch(name: str, blocks: int) -> SeenLaunch:
    return SeenLaunch(name=name, grid=(blocks, 1, 1), block=(128, 1, 1), shared_bytes=0)
