"""A run from its header to its last row: preflight, then every problem's round. Rows are on disk as they come."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count

from flashmoe_science.kernel import Kernel
from flashmoe_science.measure import resume
from flashmoe_science.measure.bench import Bench, Candidate
from flashmoe_science.measure.course import course
from flashmoe_science.measure.ledger import COULD_NOT_RUN, Ledger, Sink
from flashmoe_science.measure.paths import Paths, Todo, look
from flashmoe_science.measure.prebuild import prebuild
from flashmoe_science.measure.preflight import SMOKE, SMOKE_CPU, commit, environment, smoke, source_digest
from flashmoe_science.measure.price import price_per_hour
from flashmoe_science.measure.round import BudgetSpent, Plan, Round
from flashmoe_science.measure.timing import FEW, FULL
from flashmoe_science.problem import Problem
from flashmoe_science.records import DoneRow, EndRow, Row, RunRow, TimingRow
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Estimate:
    """A pair as it was just sampled: medians alone, no interval, nothing refused. The judge may well say otherwise."""

    problem: str
    kernel: str
    rival: str
    conditions: str
    ratio: float  # the rival's median over the kernel's


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a session stands, for a progress bar. ``done`` of ``total`` things (problems, builds) are done.

    ``share``: how much of the session's time is expected to be over, from 0 to 1; where it is None, ``done / total`` is.
    ``estimate``: the pair that has just been sampled, where one has.
    """

    done: int
    total: int
    text: str
    share: float | None = None
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What a session is to measure. ``budget_s`` of None is no limit."""

    suite: str
    problems: tuple[Problem, ...]
    subjects: tuple[Kernel, ...]
    rivals: tuple[Kernel, ...]
    command: tuple[str, ...]
    quick: bool = False
    configs: int = 4
    budget_s: float | None = None
    seed: int = 42
    left_out: tuple[str, ...] = ()  # peers that a default choice leaves unmeasured
    warm: bool = False  # time with a warm cache too, beside the cold one
    beside: str | None = None  # who else timed on the device meanwhile, in words


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a session ended. ``exit_code`` is the measuring half's: 0, 1, 2 or 3 as `flashmoe prove` documents them."""

    run: str
    exit_code: int
    problems_done: int
    problems_left: int
    checked: int
    timed: int
    wrong: tuple[str, ...]
    untrustworthy: tuple[str, ...]
    stopped: str | None  # why the run could not go on, where it could not


def new_run_id() -> str:
    """When, to the second, and six digits that keep two runs of one second apart."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def begin(ledger: Ledger, bench: Bench, suite: str, command: Sequence[str], seed: int) -> None:
    """Write a run's header."""
    ledger.add(
        RunRow(
            run=ledger.run,
            started=_utc(),
            suite=suite,
            command=list(command),
            commit=commit(),
            source_digest=source_digest(),
            seed=seed,
            environment=environment(bench),
            price_per_hour=price_per_hour(),
        )
    )


def note_surroundings(ledger: Ledger, bench: Bench, beside: str | None) -> None:
    """Note what disturbs a run's times: ``beside`` says who else timed on the device, if anybody did."""
    if beside:
        ledger.note(beside)
    if bench.gpu is None:
        ledger.note("timed on one CPU thread, which other work on the machine disturbs least")


def end(ledger: Ledger, began: float, code: int) -> None:
    """Write a run's last row. ``began`` is on time.monotonic's clock."""
    ledger.add(
        EndRow(
            run=ledger.run,
            ended=_utc(),
            wall_seconds=round(time.monotonic() - began, 3),
            device_seconds=round(ledger.device_seconds, 3),
            exit_code=code,
        )
    )


def outcome(ledger: Ledger, code: int, done: int, left: int, stopped: str | None) -> Outcome:
    return Outcome(
        run=ledger.run,
        exit_code=code,
        problems_done=done,
        problems_left=left,
        checked=ledger.checked,
        timed=ledger.timed,
        wrong=tuple(ledger.wrong),
        untrustworthy=tuple(ledger.untrustworthy),
        stopped=stopped,
    )


def recalled(run: Run, peers: Collection[str]) -> Outcome:
    """How a run that ended by itself went, from its record."""
    ledger = Ledger(run.header.run, _Nowhere())
    ledger.recall(run, peers)
    code = next(row.exit_code for row in reversed(run.rows) if isinstance(row, EndRow))
    return outcome(ledger, code, len(run.done), 0, None)


class _Nowhere:
    """Where rows go that are recorded already."""

    def append(self, row: Row) -> None:
        raise AssertionError(f"a row of kind {row.kind!r} was added to a run that has ended")


class Session:
    """Measures on one bench into one file. ``earlier`` is the run that the file holds already, where it is gone on with."""

    def __init__(
        self,
        bench: Bench,
        sink: Sink,
        options: Options,
        watch: Callable[[Progress], None],
        earlier: Run | None = None,
    ) -> None:
        self.bench, self.options, self.watch, self.earlier = bench, options, watch, earlier
        self.ledger = Ledger(new_run_id() if earlier is None else earlier.header.run, sink, self._saw)
        self.problems = options.problems if earlier is None else resume.left(earlier, options.problems)
        self._began = time.monotonic()
        self._told = Progress(0, len(self.problems), "preflight")

    def run(self) -> Outcome:
        """Preflight, then every problem in turn. Returns how it went; what the disk raises, it raises.

        Raises:
            CannotResume: the earlier run cannot be gone on with here; nothing has been written.
        """
        options = self.options
        began = self._began
        if self.earlier is None:
            begin(self.ledger, self.bench, options.suite, options.command, options.seed)
        else:
            began -= self._go_on(self.earlier)
        with self.bench.alone():
            done, stopped = self._stages() if self.problems else (0, None)
        left = len(self.problems) - done
        if left and not stopped:
            self.ledger.note(f"the budget of {self.options.budget_s:.3g} s is spent: {left} problems were not finished")
        code = COULD_NOT_RUN if stopped else self.ledger.exit_code
        end(self.ledger, began, code)
        return outcome(self.ledger, code, len(options.problems) - left, left, stopped)

    def _go_on(self, earlier: Run) -> float:
        """Say in the record that the run goes on. Returns how many seconds it had taken before.

        Raises:
            CannotResume: as ``resume.check_same``.
        """
        resume.check_same(earlier, self.bench, self.options.problems)
        peers = {kernel.name for kernel in (*self.options.subjects, *self.options.rivals) if kernel.origin == "peer"}
        row = resume.resume_row(earlier)
        self.ledger.recall(earlier.gone_on(row), peers)
        self.ledger.add(row)
        whole = len(self.options.problems) - len(self.problems)
        self.ledger.note(
            f"resumed {row.resumed} at commit {row.commit}, source {row.source_digest[:12]}: {whole} problems were finished, "
            f"{len(row.again)} are measured again from their beginning, {len(self.problems) - len(row.again)} had not begun"
        )
        return row.seconds_before

    def _stages(self) -> tuple[int, str | None]:
        """Preflight, call paths, rounds. Returns how many problems were finished and, if so, why the run stopped."""
        stopped = self._preflight()
        if stopped:
            return 0, stopped
        plan = self._plan()
        try:
            paths = self._paths(plan)
        except BudgetSpent:
            return 0, None
        except RuntimeError as error:
            return 0, self._stop(str(error))
        return self._rounds(plan, paths), None

    def _preflight(self) -> str | None:
        """Note who is absent, run each subject once. Returns why the run cannot go on, or None."""
        self._tell(self._told)
        note_surroundings(self.ledger, self.bench, self.options.beside)
        if self.options.left_out:
            self.ledger.note(f"left out for their time; --against or --full measures them: {', '.join(self.options.left_out)}")
        for kernel in self.options.rivals:
            reason = kernel.absent()
            if reason is not None:
                self.ledger.note(reason, kernel=kernel.name)
        tiny = SMOKE if self.bench.gpu is not None else SMOKE_CPU
        able = [kernel for kernel in self.options.subjects if kernel.supports(tiny, self.bench.gpu) is None]
        wrong = smoke(self.bench, [Candidate(kernel, kernel.configs(tiny, self.bench.gpu)[0]) for kernel in able])
        return self._stop("; ".join(wrong)) if wrong else None

    def _stop(self, reason: str) -> str:
        self.ledger.refuse("preflight", reason)
        return reason

    def _plan(self) -> Plan:
        options = self.options
        return Plan(
            subjects=tuple(kernel for kernel in options.subjects if kernel.absent() is None),
            rivals=tuple(kernel for kernel in options.rivals if kernel.absent() is None),
            configs=options.configs,
            sampling=FEW if options.quick else FULL,
            quick=options.quick,
            seed=options.seed,
            deadline=None if options.budget_s is None else self._began + options.budget_s,
            warm=options.warm,
        )

    def _paths(self, plan: Plan) -> Paths:
        """Build our kernels, then see what every call launches; nothing on a CPU, which launches no kernels.

        Raises:
            RuntimeError: the profiler sees nothing.
            BudgetSpent: the deadline has passed.
        """
        problems = self.problems
        if self.bench.gpu is None:
            return {}
        todo = [Todo(problem, plan.candidates(problem, self.bench.gpu)) for problem in problems]
        ahead = course(problems, plan, self.bench.gpu)

        def built(done: int, builds: int) -> None:
            self._tell(Progress(done, builds, "building the kernels", ahead.at_building(done, builds)))

        def looked(index: int, text: str) -> None:
            if plan.deadline is not None and time.monotonic() > plan.deadline:
                raise BudgetSpent
            self._tell(Progress(index, len(problems), f"call path of {text}", ahead.at_path(index)))

        prebuild(self.bench, todo, plan.deadline, built)
        return look(todo, self.options.seed, looked)

    def _rounds(self, plan: Plan, paths: Paths) -> int:
        """Measure the problems; returns how many were finished before the budget was spent."""
        total, ahead = len(self.problems), course(self.problems, plan, self.bench.gpu)
        for index, problem in enumerate(self.problems):
            steps = count()

            def tell(text: str, index: int = index, problem: Problem = problem, steps: Iterator[int] = steps) -> None:
                self._tell(Progress(index, total, f"{problem}: {text}", ahead.at_round(index, next(steps))))

            try:
                Round(self.bench, problem, plan, paths, self.ledger, tell).go()
            except BudgetSpent:
                return index
            self.ledger.add(DoneRow(run=self.ledger.run, problem=str(problem)))
        self._tell(Progress(total, total, "measured", 1.0))
        return total

    def _tell(self, progress: Progress) -> None:
        self._told = progress
        self.watch(progress)

    def _saw(self, row: Row) -> None:
        """Tell of a pair that has just been written."""
        if isinstance(row, TimingRow) and row.kernel != row.rival:
            ratio = statistics.median(row.b) / statistics.median(row.a)
            conditions = f"{row.clock} clock, {row.cache} cache"
            self.watch(replace(self._told, estimate=Estimate(row.problem, row.kernel, row.rival, conditions, ratio)))


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
