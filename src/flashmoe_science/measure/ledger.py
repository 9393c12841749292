"""The rows of a run as they come: each is written at once, and counted for the run's own verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from flashmoe_science.measure.bench import Candidate
from flashmoe_science.problem import Problem
from flashmoe_science.records import CorrectnessRow, NoteRow, RefusalRow, Row, Stage, TimingRow
from flashmoe_science.store import Run

GOOD, WRONG, COULD_NOT_RUN, UNTRUSTWORTHY = 0, 1, 2, 3  # exit codes of `flashmoe prove`


class Sink(Protocol):
    """Where rows go; ``store.RunWriter`` is one."""

    def append(self, row: Row) -> None: ...


class Ledger:
    """Writes rows of one run and remembers what went wrong, in words."""

    def __init__(self, run: str, sink: Sink, saw: Callable[[Row], None] = lambda row: None) -> None:
        self.run = run
        self.wrong: list[str] = []  # our kernels that are wrong
        self.untrustworthy: list[str] = []  # numbers that were refused
        self.checked = self.timed = 0
        self.device_seconds = 0.0
        self._sink, self._saw = sink, saw  # who is told of each row once it is written

    def add(self, row: Row) -> None:
        self._sink.append(row)
        self._tally(row)
        self._saw(row)

    def _tally(self, row: Row) -> None:
        if isinstance(row, CorrectnessRow):
            self.checked += 1
        if isinstance(row, TimingRow):
            self.timed += 1
            self.device_seconds += row.device_seconds

    def note(self, text: str, problem: Problem | None = None, kernel: str | None = None) -> None:
        self.add(NoteRow(run=self.run, text=text, problem=None if problem is None else str(problem), kernel=kernel))

    def refuse(self, stage: Stage, reason: str, problem: Problem | None = None, candidate: Candidate | None = None) -> None:
        """Record a number that is not given. Of ours it also decides the exit code; a peer's is the peer's affair."""
        self.add(
            RefusalRow(
                run=self.run,
                stage=stage,
                problem=None if problem is None else str(problem),
                kernel=None if candidate is None else candidate.name,
                config=None if candidate is None else str(candidate.config),
                reason=reason,
            )
        )
        if candidate is None or candidate.kernel.origin == "ours":
            where = " on ".join(str(one) for one in (candidate, problem) if one is not None)
            self._count(stage, f"{where}: {reason}" if where else reason)

    def take(self, row: Row) -> None:
        """Add a row that another process wrote about one of our kernels; a refusal counts as if it had been made here."""
        self.add(row)
        if isinstance(row, RefusalRow):
            self._count(row.stage, _said(row))

    def recall(self, run: Run, peers: Collection[str]) -> None:
        """Count what the run holds already, without writing it again; a refusal of one of ``peers`` is not ours."""
        self.device_seconds += sum(row.device_seconds for row in run.voided if isinstance(row, TimingRow))
        for row in run.rows:
            self._tally(row)
            if isinstance(row, RefusalRow) and row.kernel not in peers:
                self._count(row.stage, _said(row))

    def _count(self, stage: Stage, words: str) -> None:
        (self.untrustworthy if stage in ("sanity", "timing") else self.wrong).append(words)

    @property
    def exit_code(self) -> int:
        if self.wrong:
            return WRONG
        if self.untrustworthy:
            return UNTRUSTWORTHY
        return GOOD if self.checked else COULD_NOT_RUN


def _said(row: RefusalRow) -> str:
    config, problem = f" ({row.config})" if row.config else "", f" on {row.problem}" if row.problem else ""
    return f"{row.kernel}{config}{problem}: {row.reason}"
