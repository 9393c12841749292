"""A run that puts candidates on trial, from its header to its last row: one after the other, each in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.ledger import COULD_NOT_RUN, GOOD, Ledger, Sink
from flashmoe_science.measure.parties import CleanRoom
from flashmoe_science.measure.round import BudgetSpent
from flashmoe_science.measure.session import Outcome, Progress, begin, end, new_run_id, outcome
from flashmoe_science.measure.trial import Asked, Trial, Unusable
from flashmoe_science.problem import Problem
from flashmoe_science.records import RefusalRow


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
    beside: str | None = None  # who else timed on the device meanwhile, in words


class Trials:
    """Measures on one bench into one file."""

    def __init__(self, bench: Bench, sink: Sink, options: Options, watch: Callable[[Progress], None]) -> None:
        self.bench, self.options, self.watch = bench, options, watch
        self.ledger = Ledger(new_run_id(), sink)
        self._began = time.monotonic()
        self._done = 0
        self._left = 0
        self._unusable: list[str] = []
        self._clean_room = CleanRoom(options.watchdog_s)

    def run(self) -> Outcome:
        """Every candidate in turn. Returns how it went; what the disk raises, it raises."""
        options = self.options
        begin(self.ledger, self.bench, options.suite, options.command, options.seed)
        if options.beside:
            self.ledger.note(options.beside)
        if self.bench.gpu is None:
            self.ledger.note("timed on one CPU thread, which other work on the machine disturbs least")
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
        end(self.ledger, self._began, code)
        return outcome(self.ledger, code, self._done, self._left, "; ".join(self._unusable) or None)

    def _try(self, index: int, spec: str) -> None:
        options = self.options
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
        for problem in self.options.problems or (None,):
            where = None if problem is None else str(problem)
            self.ledger.add(
                RefusalRow(run=self.ledger.run, stage="preflight", problem=where, kernel=spec, config="", reason=reason)
            )
