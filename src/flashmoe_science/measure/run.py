"""All that ``flashmoe prove`` measures, in order: builds where there is no GPU, then a run for each group of problems, or one
of the functions that a user brought. Each run has a file of its own, whose rows are on disk as they come.
"""

from __future__ import annotations

import time
from pathlib import Path

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.kernel import AnyKernel, Device
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.channel import Failed, Home, InProcess
from flashmoe_science.measure.function_child import Unusable
from flashmoe_science.measure.function_run import FunctionRun
from flashmoe_science.measure.inputs import Memory
from flashmoe_science.measure.offline import SUITE, OfflineRun, kernels_to_build
from flashmoe_science.measure.on_problem import Blind, Launches, OnProblem, look
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.prebuild import prebuild
from flashmoe_science.measure.problem_run import ProblemRun, configs_of
from flashmoe_science.measure.request import Entry, Group, Implementation, Request, groups, of_kernel, rivals_of, subjects
from flashmoe_science.measure.session import (
    COULD_NOT_RUN,
    NOTHING_EARLIER,
    WRONG,
    BudgetSpent,
    Earlier,
    Outcome,
    Session,
    Watch,
)
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.store import RunWriter

_LOOK_WATCHDOG_S = 600.0  # a peer may compile for minutes when it is first called


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


class KernelsRun:
    """Kernels of the package on a group of problems, in this process."""

    def __init__(self, session: Session, group: Group) -> None:
        self.session, self.bench, self.request = session, session.bench, session.request
        self.group = group
        kernels, self.rivals = taking_part(self.request, group, self.bench.gpu)
        self.subjects = tuple(map(of_kernel, kernels))
        done = session.earlier.of_kernel(None)
        self.problems = tuple(problem for problem in group.problems if str(problem) not in done)
        handover = Memory()
        self.worker = InProcess(Worker(self.bench, handover, trusted=True).commands)
        self.oracle = InProcess(Oracle(handover, self.bench.device).commands)

    def run(self) -> Outcome:
        """Preflight, call paths, then every problem in turn. Returns how it went; what the disk raises, it raises."""
        self.session.begin(self.group.name)
        self.session.total, stopped = len(self.problems), None
        if self.problems:
            with self.bench.alone():
                stopped = self._stages()
        return self.session.end(stopped, 0 if stopped else self.session.total - self.session.done)

    def _stages(self) -> str | None:
        """Returns why the run stopped, where it did."""
        self.session.tell("preflight")
        self.worker.ask("open", spec=None, contract=self.group.op)
        self.oracle.ask("open", contract=self.group.op)
        self._note_absent()
        stopped = "; ".join(self._smoke()) or None
        try:
            if stopped is None:
                stopped = self._problems(self._launches())
        except BudgetSpent:
            return None
        except Blind as error:
            stopped = str(error)
        if stopped is not None:
            self.session.unusable(stopped)
        return stopped

    def _note_absent(self) -> None:
        for one in self.rivals:
            reason = None if one.kernel is None else one.kernel.absent()
            if reason is not None:
                self.session.note(reason, kernel=one.name)
        self.rivals = tuple(one for one in self.rivals if one.kernel is None or one.kernel.absent() is None)

    def _smoke(self) -> list[str]:
        """Run each subject once on a tiny problem. Returns what went wrong, in words."""
        text = operation(self.group.op).contract().smoke(self.bench.gpu)
        if text is None:
            return []
        problem, wrong = parse_problem(text), []
        on = self._on(problem, {})
        for one in self.subjects:
            if one.cannot(problem, self.bench.gpu) is not None:
                continue
            entry = Entry(one, one.configs(problem, self.bench.gpu, 1)[0])
            try:
                reasons = on.exam(entry).glance().reasons
            except Failed as error:
                reasons = [f"did not run: {error}"]
            wrong += [f"{entry} on '{problem}': {reason}" for reason in reasons]
        return wrong

    def _on(self, problem: Problem, launches: Launches) -> OnProblem:
        """Have the worker and the oracle begin a problem."""
        self.worker.ask("problem", text=str(problem))  # first: it lets the tensors of the problem before go
        asked = self.oracle.ask("problem", text=str(problem), by_function=False)
        return OnProblem(
            session=self.session,
            problem=problem,
            worker=self.worker,
            rivals_alone=self.worker,
            oracle=self.oracle,
            input_bytes=int(asked["input_bytes"]),
            step=lambda text: self.session.step(f"{problem}: {text}"),
            launches=launches,
        )

    def _launches(self) -> Launches:
        """Build our kernels, then see what every call launches; nothing on a CPU, which launches no kernels.

        Raises:
            Blind: the profiler sees nothing.
            BudgetSpent: the deadline has passed.
        """
        if self.bench.gpu is None:
            return {}
        todo = [(problem, self._configs(problem)) for problem in self.problems]
        prebuild(self.bench, self.group.op, todo, self.session.deadline, self.session.tell)
        return look(None, self.group.op, todo, self.request.seed, _LOOK_WATCHDOG_S, self.session.step)

    def _configs(self, problem: Problem) -> list[tuple[str, str]]:
        return [
            (one.who, config)
            for one in (*self._subjects_on(problem), *self.rivals)
            if one.cannot(problem, self.bench.gpu) is None
            for config in configs_of(one, problem, self.bench.gpu, self.request)
        ]

    def _subjects_on(self, problem: Problem) -> tuple[Implementation, ...]:
        """The subjects; on a drawn problem the one that the automatic choice takes, which is what a user gets."""
        if not self.request.as_dispatched:
            return self.subjects
        op = operation(self.group.op)
        chosen = select(problem, self.bench.gpu, committed_table(), op.ours(), op.fallback()).kernel
        return tuple(one for one in self.subjects if one.name == chosen)

    def _problems(self, launches: Launches) -> str | None:
        """Measure the problems. Returns which of them could not be. Raises BudgetSpent."""
        failed = []
        for problem in self.problems:
            try:
                ProblemRun(self._on(problem, launches)).go(self._subjects_on(problem), self.rivals)
            except Failed as error:
                failed.append(f"{problem} cannot be measured: {error}")
            else:
                self.session.finish(problem, None)
                self.session.done += 1
        self.session.tell("measured")
        return "; ".join(failed) or None


class FunctionsRun:
    """Functions that a user brought, one after the other, each in a child of its own. ``problems`` of None are those of each
    function's contract."""

    def __init__(self, session: Session, problems: tuple[Problem, ...] | None) -> None:
        self.session, self.bench, self.request = session, session.bench, session.request
        self.problems = problems
        self._homes: dict[str, Home] = {}  # of rivals alone, by contract

    def run(self, suite: str = "custom") -> Outcome:
        """Every function in turn. Returns how it went; what the disk raises, it raises."""
        self.session.begin(suite)
        unusable, left = [], 0
        each, functions = len(self.problems or (None,)), self.request.functions
        self.session.total = each * len(functions)
        try:
            with self.bench.alone():
                for after, spec in zip(reversed(range(len(functions))), functions, strict=True):
                    one = FunctionRun(self.session, spec, self.problems, self._homes)
                    try:
                        one.go()
                    except Unusable as error:
                        unusable.append(f"{spec}: {error}")
                        self._cannot(spec, str(error))
                    except BudgetSpent:
                        left += max(1, len(one.problems) - one.finished)
                    self.session.done = self.session.total - after * each
        finally:
            for home in self._homes.values():
                home.close()
        return self.session.end("; ".join(unusable) or None, left)

    def _cannot(self, spec: str, reason: str) -> None:
        """Refuse a function on every problem that was named, so that each has its verdict; else once."""
        for problem in self.problems or (None,):
            self.session.unusable(reason, problem, spec)
            if problem is not None and str(problem) not in self.session.earlier.of_kernel(spec):
                self.session.finish(problem, spec)


class Plan:
    """A request made definite. Making it raises ValueError, in one line, for whatever cannot be done."""

    def __init__(self, request: Request) -> None:
        self.request, self.bench = request, bench_here()
        self.groups = groups(request, self.bench.gpu)
        self.problems = tuple(dict.fromkeys(problem for group in self.groups for problem in group.problems)) or None
        builds = self.bench.gpu is None and not request.functions
        ops = {group.op for group in self.groups}
        self.to_build = tuple(one for one in kernels_to_build(request.kernel) if builds and one.op in ops)
        # Without a GPU a kernel of ours that is named is built, and there is nothing of it to time.
        self.timed = () if request.functions or (self.to_build and request.kernel is not None) else self.groups
        for group in self.timed:
            taking_part(request, group, self.bench.gpu)
        self.found: list[str] = []  # what a run without a GPU found, in words

    def run(self, folder: Path, watch: Watch, earlier: Earlier = NOTHING_EARLIER) -> list[Outcome]:
        """Every stage in order; after one that fails, none further. Raises StoreError."""
        began, outcomes = time.monotonic(), list[Outcome]()
        if self.request.functions:
            with RunWriter(_free(folder, "functions")) as writer:
                session = Session(self.bench, writer, self.request, watch, earlier, began)
                suite = self.groups[0].name if len(self.groups) == 1 else "custom"
                return [FunctionsRun(session, self.problems).run(suite)]
        if self.to_build and not earlier.done:
            with RunWriter(_free(folder, SUITE)) as writer:
                named = self.problems if self.request.targets else None
                offline = OfflineRun(Session(self.bench, writer, self.request, watch), self.to_build, named)
                outcomes.append(offline.run())
                self.found += offline.found
        for group in self.timed:
            if outcomes and outcomes[-1].exit_code in (WRONG, COULD_NOT_RUN):
                break
            with RunWriter(_free(folder, group.name)) as writer:
                outcomes.append(KernelsRun(Session(self.bench, writer, self.request, watch, earlier, began), group).run())
        return outcomes


def _free(folder: Path, name: str) -> Path:
    """A file of that name that does not exist yet: run-NAME.jsonl, then run-NAME-2.jsonl and so on."""
    path, number = folder / f"run-{name}.jsonl", 2
    while path.exists():
        path, number = folder / f"run-{name}-{number}.jsonl", number + 1
    return path
