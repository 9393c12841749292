"""A run from its header to its last row: kernels of the package on a group of problems, or functions that a user brought.

Rows are on disk as they come. What a run that was cut left to do is measured by a second run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.kernel import AnyKernel, Device
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.channel import Failed, InProcess
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.environment import commit, environment, source_digest
from flashmoe_science.measure.function_child import Unusable
from flashmoe_science.measure.function_run import FunctionRequest, FunctionRun, RivalChildren
from flashmoe_science.measure.handover import Memory
from flashmoe_science.measure.implementation import Entry, Implementation, left_out, of_function, of_kernel, rivals_of
from flashmoe_science.measure.launches.look import Blind, Launches, look
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.prebuild import prebuild
from flashmoe_science.measure.problem_run import BudgetSpent, Effort, ProblemRun, configs_of
from flashmoe_science.measure.recorder import COULD_NOT_RUN, GOOD, Recorder, Sink
from flashmoe_science.measure.request import Group, Request, budget_left, subjects
from flashmoe_science.measure.worker.loading import files_digest, functions_beside
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import DoneRow, EndRow, PromiseRow, RefusalRow, RunRow
from flashmoe_science.store import Run

_LOOK_WATCHDOG_S = 600.0  # a peer may compile for minutes when it is first called


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, for a progress bar: ``done`` of ``total`` things (problems, builds)."""

    done: int
    total: int
    text: str


Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``exit_code`` is the measuring half's: 0, 1, 2 or 3 as `flashmoe prove` documents them."""

    run: str
    exit_code: int
    problems_done: int
    problems_left: int
    checked: int
    timed: int
    wrong: tuple[str, ...]
    untrustworthy: tuple[str, ...]
    peers_refused: tuple[str, ...]
    stopped: str | None  # why the run could not go on, where it could not
    device_seconds: float = 0.0
    codes: tuple[str, ...] = ()  # of what is wrong or was refused, for machines


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


def new_run_id() -> str:
    """When, to the second, and six digits that keep two runs of one second apart."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def begin(recorder: Recorder, bench: Bench, suite: str, command: Sequence[str], seed: int, price: float | None = None) -> None:
    """Write a run's header. ``price`` is USD an hour for the machine, where the user gave one."""
    recorder.add(
        RunRow(
            run=recorder.run,
            started=_utc(),
            suite=suite,
            command=list(command),
            commit=commit(),
            source_digest=source_digest(),
            seed=seed,
            environment=environment(bench),
            price_per_hour=price,
        )
    )


def end(recorder: Recorder, began: float, code: int) -> None:
    """Write a run's last row. ``began`` is on time.monotonic's clock."""
    recorder.add(
        EndRow(
            run=recorder.run,
            ended=_utc(),
            wall_seconds=round(time.monotonic() - began, 3),
            device_seconds=round(recorder.device_seconds, 3),
            exit_code=code,
        )
    )


def outcome(recorder: Recorder, code: int, done: int, left: int, stopped: str | None) -> Outcome:
    return Outcome(
        run=recorder.run,
        exit_code=code,
        problems_done=done,
        problems_left=left,
        checked=recorder.checked,
        timed=recorder.timed,
        wrong=tuple(recorder.wrong),
        untrustworthy=tuple(recorder.untrustworthy),
        peers_refused=tuple(recorder.peers_refused),
        stopped=stopped,
        device_seconds=recorder.device_seconds,
        codes=tuple(recorder.codes),
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run is told of the machine: what else timed on the device meanwhile, the price of an hour, seconds gone."""

    beside: str | None = None
    price: float | None = None
    seconds_gone: float = 0.0


class _Base:
    """What both kinds of runs do."""

    def __init__(
        self, bench: Bench, sink: Sink, request: Request, watch: Watch, around: Surroundings, earlier: Earlier
    ) -> None:
        self.bench, self.request, self.watch, self.around, self.earlier = bench, request, watch, around, earlier
        self.recorder = Recorder(new_run_id(), sink)
        self.began = time.monotonic()
        left = budget_left(request, around.seconds_gone)
        self.effort = Effort(
            seed=request.seed,
            quick=request.quick,
            configs=request.configs,
            warm=request.warm,
            as_dispatched=request.draw is not None and request.kernel is None,
            deadline=None if request.budget_s is None else self.began + left,
        )

    def _begin(self, suite: str) -> None:
        begin(self.recorder, self.bench, suite, self.request.command, self.request.seed, self.around.price)
        for row in self.earlier.stand:  # found wrong before the run was cut: wrong it stays
            self.recorder.take(row.model_copy(update={"run": self.recorder.run}), counts=True)
        if self.around.beside:
            self.recorder.note(self.around.beside)
        if self.bench.gpu is None:
            self.recorder.note("timed on one CPU thread, which other work on the machine disturbs least")

    def _end(self, done: int, left: int, stopped: str | None, code: int) -> Outcome:
        if left and not stopped:
            self.recorder.note(f"the budget of {self.request.budget_s:.3g} s is spent: {left} problems were not finished")
        end(self.recorder, self.began, code)
        return outcome(self.recorder, code, done, left, stopped)

    def _tell(self, done: int, total: int, text: str) -> None:
        self.watch(Progress(done, total, text))


def taking_part(request: Request, group: Group, device: Device) -> tuple[tuple[AnyKernel, ...], tuple[Implementation, ...]]:
    """The kernels that a run of a group is about, and what they are compared with.

    Raises:
        ValueError: a kernel that is not there or serves none of the problems; no rival is left.
    """
    kernels = subjects(request, group, device)
    rivals = rivals_of(group.op, (), request.against, request.full, device, tuple(map(of_kernel, kernels)))
    if not rivals:
        raise ValueError(f"--against leaves no rival for {', '.join(one.name for one in kernels)}; name another")
    return kernels, rivals


class KernelsRun(_Base):
    """Kernels of the package on a group of problems, in this process."""

    def __init__(
        self,
        bench: Bench,
        sink: Sink,
        request: Request,
        group: Group,
        watch: Watch,
        around: Surroundings = Surroundings(),  # frozen
        earlier: Earlier = NOTHING_EARLIER,
    ) -> None:
        super().__init__(bench, sink, request, watch, around, earlier)
        self.group = group
        self.contract = operation(group.op).contract()
        self.kernels, self.rivals = taking_part(request, group, bench.gpu)
        self.subjects = tuple(map(of_kernel, self.kernels))
        done = earlier.of_kernel(None)
        self.problems = tuple(problem for problem in group.problems if str(problem) not in done)
        handover = Memory()
        self.worker = InProcess(Worker(bench, handover, trusted=True).commands)
        self.oracle = InProcess(Oracle(handover, bench.device).commands)

    def run(self) -> Outcome:
        """Preflight, call paths, then every problem in turn. Returns how it went; what the disk raises, it raises."""
        self._begin(self.group.name)
        with self.bench.alone():
            done, stopped = self._stages() if self.problems else (0, None)
        left = len(self.problems) - done
        return self._end(len(self.group.problems) - left, left, stopped, COULD_NOT_RUN if stopped else self.recorder.exit_code)

    def _stages(self) -> tuple[int, str | None]:
        """Returns how many problems were finished and, if so, why the run stopped."""
        self._tell(0, len(self.problems), "preflight")
        for channel in (self.worker, self.oracle):
            what: Mapping[str, str | None] = {"spec": None} if channel is self.worker else {}
            channel.ask("open", contract=self.group.op, **what)
        self._note_absent()
        wrong = self._smoke()
        if wrong:
            reason = "; ".join(wrong)
            self.recorder.refuse("preflight", reason)
            return 0, reason
        try:
            launches = self._launches()
        except BudgetSpent:
            return 0, None
        except Blind as error:
            self.recorder.refuse("preflight", str(error))
            return 0, str(error)
        return self._problems(launches), None

    def _note_absent(self) -> None:
        out = left_out(self.group.op, (*self.subjects, *self.rivals), self.bench.gpu)
        if out and not self.request.against:
            self.recorder.note(f"left out for their time; --against or --full measures them: {', '.join(out)}")
        for one in self.rivals:
            reason = None if one.kernel is None else one.kernel.absent()
            if reason is not None:
                self.recorder.note(reason, kernel=one.name)
        self.rivals = tuple(one for one in self.rivals if one.kernel is None or one.kernel.absent() is None)

    def _smoke(self) -> list[str]:
        """Run each subject once on a tiny problem. Returns what went wrong, in words."""
        text = self.contract.smoke(self.bench.gpu)
        if text is None:
            return []
        problem = parse_problem(text)
        self.worker.ask("problem", text=str(problem))
        self.oracle.ask("problem", text=str(problem), by_function=False)
        wrong = []
        for kernel in self.kernels:
            if kernel.cannot(problem, self.bench.gpu) is not None:
                continue
            config = str(kernel.configs(problem, self.bench.gpu)[0])
            exam = Exam(
                self.worker, self.oracle, kernel.name, config, self.effort.seed, self.bench.gpu is not None, lambda text: None
            )
            try:
                reasons = exam.glance().reasons
            except Failed as error:
                reasons = [f"did not run: {error}"]
            wrong += [f"{kernel.name} ({config}) on '{problem}': {reason}" for reason in reasons]
        return wrong

    def _launches(self) -> Launches:
        """Build our kernels, then see what every call launches; nothing on a CPU, which launches no kernels.

        Raises:
            Blind: the profiler sees nothing.
            BudgetSpent: the deadline has passed.
        """
        if self.bench.gpu is None:
            return {}
        todo = [(problem, self._configs(problem)) for problem in self.problems]
        prebuild(self.bench, self.group.op, todo, self.effort.deadline, lambda done, all_: self._tell(done, all_, "building"))

        def step(index: int, problem: Problem) -> None:
            if self.effort.deadline is not None and time.monotonic() > self.effort.deadline:
                raise BudgetSpent
            self._tell(index, len(self.problems), f"call path of {problem}")

        return look(None, self.group.op, todo, self.effort.seed, _LOOK_WATCHDOG_S, step)

    def _configs(self, problem: Problem) -> list[tuple[str, str]]:
        return [
            (one.who, config)
            for one in (*self._subjects_on(problem), *self.rivals)
            if one.cannot(problem, self.bench.gpu) is None
            for config in configs_of(one, problem, self.bench.gpu, self.effort)
        ]

    def _subjects_on(self, problem: Problem) -> tuple[Implementation, ...]:
        """The subjects; on a drawn problem the one that the automatic choice takes, which is what a user gets."""
        if not self.effort.as_dispatched:
            return self.subjects
        op = operation(self.group.op)
        chosen = select(problem, self.bench.gpu, committed_table(), op.ours(), op.fallback()).kernel
        return tuple(one for one in self.subjects if one.name == chosen)

    def _problems(self, launches: Launches) -> int:
        """Measure the problems; returns how many were finished before the budget was spent."""
        total = len(self.problems)
        framework = operation(self.group.op).fallback()
        for index, problem in enumerate(self.problems):

            def tell(text: str, index: int = index, problem: Problem = problem) -> None:
                self._tell(index, total, f"{problem}: {text}")

            one = ProblemRun(
                self.bench,
                problem,
                self.contract,
                self.worker,
                self.oracle,
                launches,
                framework,
                self.effort,
                self.recorder,
                tell,
            )
            try:
                one.go(self._subjects_on(problem), self.rivals)
            except BudgetSpent:
                return index
            self.recorder.done(problem, None)
        self._tell(total, total, "measured")
        return total


class FunctionsRun(_Base):
    """Functions that a user brought, one after the other, each in a child of its own. ``problems`` of None are those of each
    function's contract."""

    def __init__(
        self,
        bench: Bench,
        sink: Sink,
        request: Request,
        problems: tuple[Problem, ...] | None,
        watch: Watch,
        around: Surroundings = Surroundings(),  # frozen
        earlier: Earlier = NOTHING_EARLIER,
    ) -> None:
        super().__init__(bench, sink, request, watch, around, earlier)
        self.problems = problems
        self._done = self._left = 0
        self._unusable: list[str] = []
        self._rival_children = RivalChildren(request.watchdog_s)

    def run(self, suite: str = "custom") -> Outcome:
        """Every function in turn. Returns how it went; what the disk raises, it raises."""
        self._begin(suite)
        try:
            with self.bench.alone():
                for index, spec in enumerate(self.request.functions):
                    self._one(index, spec)
        finally:
            self._rival_children.close()
        code = self.recorder.exit_code
        if self._unusable and code == GOOD:
            code = COULD_NOT_RUN
        stopped = "; ".join(self._unusable) or None
        if self._left:
            self.recorder.note(f"the budget is spent: {self._left} problems were not finished")
        end(self.recorder, self.began, code)
        return outcome(self.recorder, code, self._done, self._left, stopped)

    def _one(self, index: int, spec: str) -> None:
        done = self.earlier.of_kernel(spec)
        if self.problems and done >= {str(problem) for problem in self.problems}:
            self._done += len(self.problems)
            return
        request = FunctionRequest(
            spec=spec,
            problems=self.problems,
            against=self.request.against,
            every=self.request.full,
            effort=self.effort,
            watchdog_s=self.request.watchdog_s,
            sanitize=self.request.sanitize,
            sweep=self.request.sweep,
            done=done,
        )

        def tell(text: str) -> None:
            named = len(self.problems or ())
            ahead = named * (len(self.request.functions) - index - 1)
            self._tell(self._done + run.finished, self._done + max(1, len(run.problems)) + ahead, text)

        run = FunctionRun(self.bench, request, self.recorder, self._rival_children, tell)
        try:
            run.go()
        except Unusable as error:
            self._cannot(spec, str(error), done)
        except BudgetSpent:
            self._left += max(1, len(run.problems) - run.finished)
        self._done += run.finished

    def _cannot(self, spec: str, reason: str, done: frozenset[str]) -> None:
        """Refuse a function on every problem that was named, so that each has its verdict; else once."""
        self._unusable.append(f"{spec}: {reason}")
        entry = Entry(of_function(spec), "")
        for problem in self.problems or (None,):
            self.recorder.unusable(reason, problem, entry)
            if problem is not None and str(problem) not in done:
                self.recorder.done(problem, spec)


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
