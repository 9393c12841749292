"""The rows of a run as they come: each is written at once, and counted for the run's own exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flashmoe_science.measure.correctness import Finding
from flashmoe_science.measure.implementation import Entry
from flashmoe_science.problem import Problem
from flashmoe_science.records import (
    CallPathRow,
    CorrectnessRow,
    DoneRow,
    NoteRow,
    RefusalRow,
    Row,
    SeenLaunch,
    Stage,
    TimingRow,
)

GOOD, WRONG, COULD_NOT_RUN, UNTRUSTWORTHY = 0, 1, 2, 3  # exit codes of `flashmoe prove`


class Sink(Protocol):
    """Where rows go; ``store.RunWriter`` is one."""

    def append(self, row: Row) -> None: ...


class Recorder:
    """Writes rows of one run and remembers what went wrong, in words."""

    def __init__(self, run: str, sink: Sink) -> None:
        self.run = run
        self.wrong: list[str] = []  # subjects that are wrong
        self.untrustworthy: list[str] = []  # numbers of subjects that were refused, and promises that were not kept
        self.codes: dict[str, None] = {}  # of what is wrong with subjects, in the order in which it was found
        self.peers_refused: list[str] = []
        self.checked = self.timed = 0
        self.device_seconds = 0.0
        self._sink = sink

    def add(self, row: Row) -> None:
        self._sink.append(row)
        if isinstance(row, CorrectnessRow):
            self.checked += 1
        if isinstance(row, TimingRow):
            self.timed += 1
            self.device_seconds += row.device_seconds

    def note(self, text: str, problem: Problem | None = None, kernel: str | None = None) -> None:
        self.add(NoteRow(run=self.run, text=text, problem=None if problem is None else str(problem), kernel=kernel))

    def correctness(self, problem: Problem, entry: Entry, found: Finding) -> None:
        """The result of an exam; none where what came back was no tensor of the right kind: there is no error to record."""
        stats = [one for one in found.stats if one is not None]
        if not stats:
            return
        second = found.stats[1] if len(found.stats) > 1 else None
        self.add(
            CorrectnessRow(
                run=self.run,
                problem=str(problem),
                kernel=entry.name,
                origin=entry.implementation.origin,
                config=entry.config,
                passed=not found.reasons,
                out=stats[0],
                lse=second,
                peak_extra_bytes=found.peak_extra_bytes,
                output_bytes=found.output_bytes,
            )
        )

    def callpath(self, problem: Problem, entry: Entry, launches: Sequence[SeenLaunch], broken: Sequence[str]) -> None:
        self.add(
            CallPathRow(
                run=self.run,
                problem=str(problem),
                kernel=entry.name,
                config=entry.config,
                launches=list(launches),
                broken_promises=list(broken),
            )
        )

    def refuse(
        self,
        stage: Stage,
        reason: str,
        problem: Problem | None = None,
        entry: Entry | None = None,
        voids: bool = False,
        codes: Sequence[str] = (),
    ) -> None:
        """Record a number that is not given. A subject's also decides the exit code; a peer's does not.

        ``voids``: what was sampled of it on the problem is no number either.
        """
        self.take(
            RefusalRow(
                run=self.run,
                stage=stage,
                problem=None if problem is None else str(problem),
                kernel=None if entry is None else entry.name,
                config=None if entry is None else entry.config,
                reason=reason,
                codes=list(codes),
                voids=voids,
            ),
            entry is None or entry.implementation.origin != "peer",
        )

    def take(self, row: RefusalRow, counts: bool) -> None:
        """Add a refusal; ``counts`` says whether it is a subject's."""
        self.add(row)
        config, problem = f" ({row.config})" if row.config else "", f" on {row.problem}" if row.problem else ""
        words = f"{row.kernel}{config}{problem}: {row.reason}" if row.kernel else row.reason
        if counts:
            self.codes |= dict.fromkeys(row.codes)
        if not counts:
            self.peers_refused.append(words)
        elif row.stage in ("sanity", "timing", "promise"):
            self.untrustworthy.append(words)
        else:
            self.wrong.append(words)

    def unusable(self, reason: str, problem: Problem | None, entry: Entry) -> None:
        """Refuse a function that cannot be measured at all, which is no wrong result."""
        self.add(
            RefusalRow(
                run=self.run,
                stage="preflight",
                problem=None if problem is None else str(problem),
                kernel=entry.name,
                config="",
                reason=reason,
            )
        )

    def done(self, problem: Problem, kernel: str | None) -> None:
        """A problem is finished, whatever came of it; ``kernel`` is the function in a run of functions."""
        self.add(DoneRow(run=self.run, problem=str(problem), kernel=kernel))

    @property
    def exit_code(self) -> int:
        if self.wrong:
            return WRONG
        if self.untrustworthy:
            return UNTRUSTWORTHY
        return GOOD if self.checked else COULD_NOT_RUN
