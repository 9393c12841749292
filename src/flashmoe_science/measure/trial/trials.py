"""A run that puts candidates on trial, from its header to its last row: one after the other, each in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.ledger import COULD_NOT_RUN, GOOD, Ledger, Sink
from flashmoe_science.measure.resume import check_same, resume_row
from flashmoe_science.measure.round import BudgetSpent
from flashmoe_science.measure.session import Outcome, Progress, begin, end, new_run_id, note_surroundings, outcome
from flashmoe_science.measure.trial.docket import Docket
from flashmoe_science.measure.trial.loading import candidates_beside, files_digest
from flashmoe_science.measure.trial.parties import CleanRoom
from flashmoe_science.measure.trial.trial import Asked, Trial, Unusable
from flashmoe_science.problem import Problem
from flashmoe_science.records import PromiseRow, RefusalRow
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Options:
    """What a run of candidates measures. ``problems`` of None are those of each candidate's contract."""

    suite: str
    specs: tuple[str, ...]
    problems: tuple[Problem, ...] | None
    against: tuple[str, ...]
    every: bool
    command: tuple[str, ...]
    quick: bool
    seed: int
    repeats: int
    watchdog_s: float
    budget_s: float | None
    sanitize: bool = False
    beside: str | None = None  # who else timed on the device meanwhile, in words


class Trials:
    """Measures on one bench into one file."""

    def __init__(
        self,
        bench: Bench,
        sink: Sink,
        options: Options,
        watch: Callable[[Progress], None],
        earlier: Run | None = None,
    ) -> None:
        self.bench, self.options, self.watch, self.earlier = bench, options, watch, earlier
        self.ledger = Ledger(new_run_id() if earlier is None else earlier.header.run, sink)
        self._began = time.monotonic()
        self._done = 0
        self._left = 0
        self._unusable: list[str] = []
        self._clean_room = CleanRoom(options.watchdog_s)

    def run(self) -> Outcome:
        """Every candidate in turn. Returns how it went; what the disk raises, it raises.

        Raises:
            CannotResume: the earlier run cannot be gone on with here; nothing has been written.
        """
        options, before = self.options, 0.0
        if self.earlier is None:
            begin(self.ledger, self.bench, options.suite, options.command, options.seed)
        else:
            before = self._go_on(self.earlier)
        note_surroundings(self.ledger, self.bench, options.beside)
        try:
            with self.bench.alone():
                for index, spec in enumerate(options.specs):
                    self._try(index, spec)
        finally:
            self._clean_room.close()
        if self._left:
            self.ledger.note(f"the budget of {options.budget_s:g} s is spent: {self._left} problems were not finished")
        code = self.ledger.exit_code
        if self._unusable and code in (GOOD, COULD_NOT_RUN):
            code = COULD_NOT_RUN
        end(self.ledger, self._began - before, code)
        return outcome(self.ledger, code, self._done, self._left, "; ".join(self._unusable) or None)

    def _go_on(self, earlier: Run) -> float:
        """Say in the record that the run goes on. Returns how many seconds it had taken before."""
        options = self.options
        digests = {spec: files_digest(candidates_beside(spec, options.against)) for spec in options.specs}
        check_same(earlier, self.bench, options.problems, digests)
        row = resume_row(earlier, options.specs)
        self.ledger.recall(earlier.gone_on(row), not_wrong(earlier, options.specs))
        self.ledger.add(row)
        again = sum(map(len, row.again_of.values()))
        self.ledger.note(
            f"resumed {row.resumed} at commit {row.commit}, source {row.source_digest[:12]}: of a candidate on a problem, "
            f"{again} trials are held again from their beginning"
        )
        return row.seconds_before

    def _try(self, index: int, spec: str) -> None:
        options = self.options
        unusable = None if self.earlier is None else unusable_before(self.earlier, spec)
        if unusable is not None:
            self._cannot(spec, unusable)
            return
        if options.problems and self._done_before(spec) >= {str(problem) for problem in options.problems}:
            self._done += len(options.problems)
            return
        asked = Asked(
            spec=spec,
            problems=options.problems,
            against=options.against,
            every=options.every,
            quick=options.quick,
            seed=options.seed,
            repeats=options.repeats,
            watchdog_s=options.watchdog_s,
            deadline=None if options.budget_s is None else self._began + options.budget_s,
            done=self._done_before(spec),
            sanitize=options.sanitize,
            begun=self.earlier is not None and promised(self.earlier, spec),
        )

        def tell(text: str) -> None:
            self.watch(Progress(self._done, self._total(index, trial), text))

        trial = Trial(self.bench, asked, self.ledger, self._clean_room, tell)
        try:
            trial.go()
        except Unusable as error:
            self._cannot(spec, str(error))
        except BudgetSpent:
            self._left += max(1, len(trial.problems) - trial.finished)
        self._done += trial.finished

    def _total(self, index: int, trial: Trial) -> int:
        """Problems in all, as far as is known: a candidate's own are known when it is loaded."""
        named = len(self.options.problems or ())
        return self._done - trial.finished + max(1, len(trial.problems)) + named * (len(self.options.specs) - index - 1)

    def _cannot(self, spec: str, reason: str) -> None:
        """Refuse a candidate on every problem that was named, so that each has its verdict; else once."""
        self._unusable.append(f"{spec}: {reason}")
        docket = Docket(self.ledger, spec)
        told = set() if self.earlier is None else refused_on(self.earlier, spec)
        for problem in self.options.problems or (None,):
            where = None if problem is None else str(problem)
            if where not in told:
                docket.unusable(reason, problem)
            if problem is not None and where not in self._done_before(spec):
                docket.done(problem)

    def _done_before(self, spec: str) -> frozenset[str]:
        """Problems that a candidate was through with when the run was cut."""
        return frozenset() if self.earlier is None else self.earlier.done_by(spec)


def finished(run: Run, options: Options) -> bool:
    """Whether a run of candidates ended by itself with nothing left to do, as far as its record tells."""
    if not run.complete or options.problems is None:
        return False
    return all(run.done_by(spec) >= {str(problem) for problem in options.problems} for spec in options.specs)


def not_wrong(run: Run, specs: Sequence[str]) -> set[str]:
    """Kernels whose refusals are not a candidate's wrong result: rivals, and candidates that could not be put on trial."""
    refused = {row.kernel for row in run.rows if isinstance(row, RefusalRow) and row.kernel is not None}
    return (refused - set(specs)) | {spec for spec in specs if unusable_before(run, spec) is not None}


def unusable_before(run: Run, spec: str) -> str | None:
    """Why a candidate could not be put on trial at all; None where it could, or has not been met."""
    refusals = (row for row in run.rows if isinstance(row, RefusalRow) and row.kernel == spec)
    return next((row.reason for row in refusals if row.stage == "preflight"), None)


def refused_on(run: Run, spec: str) -> set[str | None]:
    """Problems on which a candidate is refused already."""
    return {row.problem for row in run.rows if isinstance(row, RefusalRow) and row.kernel == spec}


def promised(run: Run, spec: str) -> bool:
    return any(isinstance(row, PromiseRow) and row.kernel == spec for row in run.rows)
