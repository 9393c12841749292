"""A run in progress: its request, what earlier runs left to do, its rows, its deadline and its progress."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.measure.bench import Bench, commit, environment, source_digest
from flashmoe_science.measure.finding import Finding
from flashmoe_science.measure.request import Entry, Request
from flashmoe_science.measure.worker.loading import files_digest
from flashmoe_science.problem import Problem
from flashmoe_science.records import (
    CorrectnessRow,
    DoneRow,
    EndRow,
    NoteRow,
    PromiseRow,
    RefusalRow,
    Row,
    RunRow,
    Stage,
    TimingRow,
)  # fmt: skip
from flashmoe_science.store import Run, RunWriter


@dataclass(slots=True)
class Outcome:
    """The outcome of a run. ``exit_code`` is by what was measured, before it is judged; ``timed`` counts the pairs with a
    rival."""

    run: str
    exit_code: ExitCode = ExitCode.COULD_NOT_RUN
    problems_left: int = 0
    checked: int = 0
    timed: int = 0
    wrong: list[str] = field(default_factory=list)  # subjects that are wrong, in words
    untrustworthy: list[str] = field(default_factory=list)  # numbers of subjects that were refused, and promises not kept
    peers_refused: list[str] = field(default_factory=list)
    codes: dict[str, None] = field(default_factory=dict)  # of what is wrong with subjects, for machines, in order
    stopped: str | None = None  # why the run stopped early, if it did


class BudgetSpent(Exception):
    """The run's time is over; what was measured remains valid."""


# Shows progress: called with the current step, and how many problems (or builds) are done, of how many.
Watch = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Earlier:
    """The state that runs which were cut short left: ``done`` (function or None, problem) pairs, and refusals of wrong results
    on problems that are not done, which remain valid."""

    done: frozenset[tuple[str | None, str]] = frozenset()
    refusals: tuple[RefusalRow, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[Run], against: Sequence[str] = ()) -> Earlier:
        """From the runs of one command, which named the rivals ``against``. Raises ValueError: the package's source, or a
        function's file, has changed since."""
        for run in runs:
            if run.header.source_digest != source_digest():
                raise ValueError(f"{run.path} cannot be resumed: the package's source has changed; start a new run")
        rows = [row for run in runs for row in run.rows]
        for row in rows:
            if isinstance(row, PromiseRow) and row.source_digest != files_digest(row.kernel, against):
                raise ValueError(f"{row.kernel} has changed since, or a function that it is compared with; start a new run")
        done = frozenset((row.kernel, row.problem) for row in rows if isinstance(row, DoneRow))
        refusals = {
            (row.kernel, row.config, row.problem, row.reason): row
            for row in rows
            if isinstance(row, RefusalRow)
            and (row.voids or row.stage in ("callpath", "correctness"))
            and row.problem is not None
            and not done & {(row.kernel, row.problem), (None, row.problem)}
        }
        return cls(done, tuple(refusals.values()))

    def remaining(self, kernel: str | None, problems: Sequence[Problem]) -> list[Problem]:
        """The problems that are not done, in a run of functions by one of them."""
        return [problem for problem in problems if (kernel, str(problem)) not in self.done]


NOTHING_EARLIER = Earlier()


class Session:
    """A run in progress: writes its rows at once and collects its outcome. ``done`` of ``total`` problems or builds are
    finished."""

    def __init__(
        self,
        bench: Bench,
        sink: RunWriter | list[Row],
        request: Request,
        watch: Watch,
        earlier: Earlier = NOTHING_EARLIER,
        began: float | None = None,
    ) -> None:
        """``began`` is when the budget began to run, on time.monotonic's clock; by default it does now."""
        self.bench, self.request, self.earlier = bench, request, earlier
        self.run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"  # six digits keep two of one second apart
        self.outcome = Outcome(self.run)
        self._sink, self._watch, self._began, self._device_seconds = sink, watch, time.monotonic(), 0.0
        self.deadline = (self._began if began is None else began) + (request.budget_s or math.inf)
        self.done = self.total = 0
        self.doing = ""  # what was begun last, in words

    def begin(self, suite: str, world: int = 1, cards: Sequence[str] = ()) -> None:
        """Write the header, the refusals of earlier runs that remain valid, and notes on the machine. ``cards`` are the GPUs of
        the ``world`` ranks."""
        self.add(
            RunRow(
                run=self.run,
                started=_utc(),
                suite=suite,
                command=list(self.request.command),
                commit=commit(),
                source_digest=source_digest(),
                seed=self.request.seed,
                environment=environment(self.bench).model_copy(update={"cards": list(cards)}),
                world=world,
                price_per_hour=self.request.price,
            )
        )
        for row in self.earlier.refusals:  # found wrong before the run was cut: wrong it stays
            self.add(row.model_copy(update={"run": self.run}))
            self._refused(row, counts=True)
        if self.bench.gpu is None:
            self.note("a CPU times on one thread, which other work on the machine disturbs least")

    def end(self, stopped: str | None = None, left: int = 0, timed: bool = True) -> Outcome:
        """Write the last row. ``left`` problems were not finished; ``timed``: whether something was to be timed."""
        if left:
            self.note(f"the budget of {self.request.budget_s:.3g} s is spent: {left} problems were not finished")
        found = self.outcome
        found.stopped, found.problems_left = stopped, left
        asked = timed and (self.total or left)  # an earlier run may have left nothing to do
        could_run = not stopped and (found.checked or found.untrustworthy or left or not asked)
        believed = not found.untrustworthy and (found.timed or not asked)
        if found.wrong:
            found.exit_code = ExitCode.WRONG
        elif could_run:
            found.exit_code = ExitCode.GOOD if believed else ExitCode.NO_NUMBER
        wall, device = round(time.monotonic() - self._began, 3), round(self._device_seconds, 3)
        self.add(EndRow(run=self.run, ended=_utc(), wall_seconds=wall, device_seconds=device, exit_code=found.exit_code))
        return found

    def add(self, row: Row) -> None:
        self._sink.append(row)
        if isinstance(row, CorrectnessRow):
            self.outcome.checked += 1
        if isinstance(row, TimingRow):
            self.outcome.timed += row.rival != row.kernel
            self._device_seconds += row.device_seconds

    def record(self, kind: type[Row], problem: Problem, entry: Entry, **fields: Any) -> Row:
        """Add a row of that kind about an entry on a problem. Returns it."""
        who = {"run": self.run, "problem": str(problem), "kernel": entry.name, "config": entry.config}
        row: Row = kind.model_validate(who | fields)
        self.add(row)
        return row

    def timed(self, problem: Problem, own: Entry, rival: Entry, **samples: Any) -> None:
        """Record the ``samples`` of an entry beside a rival's."""
        of_rival = {"rival": rival.name, "rival_origin": rival.origin, "rival_config": rival.config}
        who = {"op": problem.op, "origin": own.origin, "quick": self.request.quick} | of_rival
        self.record(TimingRow, problem, own, **who, **samples)

    def note(self, text: str, problem: Problem | None = None, kernel: str | None = None) -> None:
        self.add(NoteRow(run=self.run, text=text, problem=None if problem is None else str(problem), kernel=kernel))

    def examined(self, problem: Problem, entry: Entry, found: Finding, rank: int = 0, voids: bool = False) -> bool:
        """Record the result of an exam (on several ranks, of one rank's part): a correctness row, and a refusal if something is
        wrong. Returns whether nothing is wrong. If no tensor of the right kind came back, there are no errors, and no row."""
        if found.stats:
            sizes = {"peak_extra_bytes": found.peak_extra_bytes, "output_bytes": found.output_bytes}
            errors = {"passed": not found.reasons, "outputs": found.stats}
            self.record(CorrectnessRow, problem, entry, origin=entry.origin, rank=rank, **errors, **sizes)
        if found.reasons:
            self.refuse("correctness", "; ".join(found.reasons), problem, entry, voids, found.codes)
        return not found.reasons

    def refuse(
        self, stage: Stage, reason: str, problem: Problem, entry: Entry, voids: bool = False, codes: Sequence[str] = ()
    ) -> None:
        """Record a refusal. A subject's also decides the exit code; a peer's does not. ``voids``: its samples on the problem
        give no number either."""
        row = self.record(RefusalRow, problem, entry, stage=stage, reason=reason, codes=list(codes), voids=voids)
        self._refused(row, entry.origin != "peer")

    def _refused(self, row: Row, counts: bool) -> None:
        """Add a refusal to the outcome; ``counts``: whether it is a subject's."""
        assert isinstance(row, RefusalRow)
        words = f"{row.kernel}{f' ({row.config})' if row.config else ''} on {row.problem}: {row.reason}"
        found = self.outcome
        if counts:
            found.codes |= dict.fromkeys(row.codes)
            (found.untrustworthy if row.stage in ("sanity", "timing", "promise") else found.wrong).append(words)
        else:
            found.peers_refused.append(words)

    def unusable(self, reason: str, problem: Problem | None = None, kernel: str | None = None) -> None:
        """Refuse what cannot be measured at all, which is no wrong result."""
        text, config = None if problem is None else str(problem), None if kernel is None else ""
        self.add(RefusalRow(run=self.run, stage="preflight", problem=text, kernel=kernel, config=config, reason=reason))

    def finish(self, problem: Problem, kernel: str | None = None) -> None:
        """Record that a problem is finished; ``kernel`` is the function in a run of functions."""
        self.add(DoneRow(run=self.run, problem=str(problem), kernel=kernel))
        self.done += 1

    def show_progress(self, text: str) -> None:
        """Show the current step and the progress."""
        self._watch(text, self.done, self.total)

    def step(self, text: str, of: str = "") -> None:
        """Show the next step, with what it is ``of``. Raises BudgetSpent past the deadline."""
        if time.monotonic() > self.deadline:
            raise BudgetSpent
        self.doing = text
        self.show_progress(f"{of}: {text}" if of else text)


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
