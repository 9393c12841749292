"""What every kind of run has: what was asked, what earlier runs left of it, its record, its deadline, and where it stands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.environment import source_digest
from flashmoe_science.measure.recorder import Outcome, Recorder, Sink
from flashmoe_science.measure.request import Request
from flashmoe_science.measure.worker.loading import files_digest, functions_beside
from flashmoe_science.records import DoneRow, PromiseRow, RefusalRow
from flashmoe_science.store import Run


class BudgetSpent(Exception):
    """The time given to the run is over; what was measured stands."""


# Told where a run stands, for a progress bar: what is being done, and how many of how many things (problems, builds) are.
Watch = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Earlier:
    """What runs that were cut leave to do: (kernel or None, problem) pairs that are ``done``, and refusals of wrong results on
    problems that are not, which stand."""

    done: frozenset[tuple[str | None, str]] = frozenset()
    stand: tuple[RefusalRow, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[Run], against: Sequence[str] = ()) -> Earlier:
        """From the runs of one command, which named the rivals ``against``.

        Raises:
            ValueError: the package's source, or a function's file, has changed since.
        """
        for run in runs:
            if run.header.source_digest != source_digest():
                raise ValueError(f"{run.path} cannot be gone on with: the package's source has changed; start a new run")
        rows = [row for run in runs for row in run.rows]
        for row in rows:
            if isinstance(row, PromiseRow) and row.source_digest != files_digest(functions_beside(row.kernel, against)):
                raise ValueError(f"{row.kernel} has changed since, or a function that it is compared with; start a new run")
        done = frozenset((row.kernel, row.problem) for row in rows if isinstance(row, DoneRow))
        stand = {
            (row.kernel, row.config, row.problem, row.reason): row
            for row in rows
            if isinstance(row, RefusalRow)
            and (row.voids or row.stage in ("callpath", "correctness"))
            and row.problem is not None
            and not done & {(row.kernel, row.problem), (None, row.problem)}
        }
        return cls(done, tuple(stand.values()))

    def of_kernel(self, kernel: str | None) -> frozenset[str]:
        return frozenset(problem for name, problem in self.done if name == kernel)


NOTHING_EARLIER = Earlier()


class Session:
    """A run on its way. ``done`` of ``total`` things are behind it."""

    def __init__(
        self,
        bench: Bench,
        sink: Sink,
        request: Request,
        watch: Watch,
        earlier: Earlier = NOTHING_EARLIER,
        began: float | None = None,
    ) -> None:
        """``began`` is when the budget began to run, on time.monotonic's clock; by default it does now."""
        self.bench, self.request, self.earlier = bench, request, earlier
        self.recorder = Recorder(sink)
        self.deadline = (time.monotonic() if began is None else began) + (request.budget_s or math.inf)
        self.done = self.total = 0
        self._watch = watch

    def begin(self, suite: str) -> None:
        """Write the header, what stands of earlier runs, and what a reader should know of the machine."""
        self.recorder.begin(self.bench, suite, self.request.command, self.request.seed, self.request.price)
        for row in self.earlier.stand:  # found wrong before the run was cut: wrong it stays
            self.recorder.take(row.model_copy(update={"run": self.recorder.run}), counts=True)
        if self.bench.gpu is None:
            self.recorder.note("timed on one CPU thread, which other work on the machine disturbs least")

    def end(self, stopped: str | None, left: int) -> Outcome:
        if left:
            self.recorder.note(f"the budget of {self.request.budget_s:.3g} s is spent: {left} problems were not finished")
        return self.recorder.end(stopped, left)

    def tell(self, text: str) -> None:
        """Show where the run stands."""
        self._watch(text, self.done, self.total)

    def step(self, text: str) -> None:
        """The same ahead of what takes time. Raises BudgetSpent past the deadline."""
        if time.monotonic() > self.deadline:
            raise BudgetSpent
        self.tell(text)
