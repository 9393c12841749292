"""A run of kernels of the package and their peers, all in this process: preflight, call paths, then every problem in turn.

On a problem: which kernels are right and launch what they promise, then the full exam of the subjects, then the clocks.
Subjects are the kernels that the run is about; rivals are the kernels that they are compared with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from flashmoe_science.contract import built_in
from flashmoe_science.kernel import Config
from flashmoe_science.measure.channel import Failed, InProcess, TooLittleMemory
from flashmoe_science.measure.compare import Comparer, Timed, Unreliable
from flashmoe_science.measure.finding import Finding
from flashmoe_science.measure.inputs import Memory
from flashmoe_science.measure.on_problem import Launches, OnProblem, ProfilerUnavailable, profile_launches
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.prebuild import prebuild, room_for
from flashmoe_science.measure.request import Entry, Group, default_kernel, subjects_and_rivals
from flashmoe_science.measure.session import BudgetSpent, Outcome, Session
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.problem import Problem

AT_A_TIME = 8  # problems, where a budget may end the run
_PROFILE_WATCHDOG_S = 600.0  # a peer may compile for minutes when it is first called
_PROFILERS = 6  # processes at once
_PROFILER_COPIES = 6  # of the largest problem's minimum traffic, that each of them may hold


class KernelsRun:
    """Kernels of the package on a group of problems, in this process."""

    def __init__(self, session: Session, group: Group) -> None:
        self.session, self.gpu, self.request, self.op = session, session.bench.gpu, session.request, operation(group.op)
        self.name, self.problems = group.name, session.earlier.remaining(None, group.problems)
        self.subjects, self.rivals = subjects_and_rivals(self.request, group, self.gpu)
        handover = Memory()
        self.worker = InProcess(Worker(session.bench, handover, trusted=True).command)
        self.oracle = InProcess(Oracle(handover, session.bench.device).command)

    def run(self) -> Outcome:
        """Preflight, call paths, then every problem in turn. Returns the outcome; errors of the disk are raised."""
        self.session.begin(self.name)
        self.session.total, stopped = len(self.problems), None
        if self.problems:
            with self.session.bench.single_threaded():
                stopped = self._stages()
        return self.session.end(stopped, 0 if stopped else self.session.total - self.session.done)

    def _stages(self) -> str | None:
        """Run every stage. Returns why the run stopped early, or None."""
        self.session.show_progress("preflight")
        self.worker.ask("open", spec=None, contract=self.op.name)
        self.oracle.ask("open", contract=self.op.name)
        for kernel in (one.kernel for one in self.rivals if one.kernel is not None):
            if (reason := kernel.absent()) is not None:
                self.session.note(reason, kernel=kernel.name)
            elif kernel.on_disk:
                # The peer then keeps on disk what it compiles and tunes in the process that profiles, for this process.
                os.environ.setdefault(kernel.on_disk, "1")
        self.rivals = tuple(one for one in self.rivals if one.kernel is None or one.kernel.absent() is None)
        stopped = "; ".join(self._smoke()) or None
        try:
            if stopped is None:
                parts = (self._problems(part, self._launches(part)) for part in self._parts())
                stopped = "; ".join(filter(None, parts)) or None
                self.session.show_progress("measured")
        except BudgetSpent:
            return None
        except ProfilerUnavailable as error:
            stopped = str(error)
        if stopped is not None:
            self.session.unusable(stopped)
        return stopped

    def _parts(self) -> Iterable[Sequence[Problem]]:
        """The problems; with a budget, which builds and call paths of all might spend, a few at a time."""
        some = AT_A_TIME if self.request.budget_s else len(self.problems)
        return (self.problems[first : first + some] for first in range(0, len(self.problems), some))

    def _problems(self, problems: Sequence[Problem], launches: Launches) -> str | None:
        """Measure problems. Returns which of them could not be. Raises BudgetSpent."""
        failed = []
        for problem in problems:
            try:
                ProblemRun(self._on(problem, launches)).go(self._subjects_on(problem), self.rivals)
            except Failed as error:
                failed.append(f"{problem} cannot be measured: {error}")
                continue
            except TooLittleMemory as error:
                self._refuse(problem, str(error))
            self.session.finish(problem)
        return "; ".join(failed) or None

    def _refuse(self, problem: Problem, reason: str) -> None:
        """Refuse every subject a number on a problem that the harness cannot examine here."""
        for one in (one for one in self._subjects_on(problem) if one.cannot(problem, self.gpu) is None):
            self.session.refuse("sanity", reason, problem, one.chosen(problem, self.gpu), voids=True)

    def _smoke(self) -> list[str]:
        """Run each subject once on a tiny problem. Returns what went wrong, in words."""
        text = self.op.contract().smoke(self.gpu)
        if text is None:
            return []
        problem, wrong = parse_problem(text), []
        on = self._on(problem, {})
        for one in (one for one in self.subjects if one.cannot(problem, self.gpu) is None):
            entry = one.chosen(problem, self.gpu)
            try:
                reasons = on.exam(entry).one_call().reasons
            except (Failed, TooLittleMemory) as error:
                reasons = [f"did not run: {error}"]
            wrong += [f"{entry} on '{problem}': {reason}" for reason in reasons]
        return wrong

    def _on(self, problem: Problem, launches: Launches) -> OnProblem:
        return OnProblem.begin(self.session, problem, self.worker, self.oracle, launches)

    def _launches(self, problems: Sequence[Problem]) -> Launches:
        """Build our kernels, then see what every call launches; nothing on a CPU. Raises ProfilerUnavailable, BudgetSpent."""
        if self.gpu is None:
            return {}
        todo = []
        for problem in problems:
            able = (one for one in (*self._subjects_on(problem), *self.rivals) if one.cannot(problem, self.gpu) is None)
            entries = (entry for one in able for entry in one.with_configs(problem, self.gpu, self.request))
            todo.append((problem, [(entry.who, entry.config) for entry in entries]))
        prebuild(self.session.bench, self.op.name, todo, self.session.deadline, self.session.show_progress)
        processes = self._profiler_count(problems)
        return profile_launches(None, self.op.name, todo, self.request.seed, _PROFILE_WATCHDOG_S, self.session.step, processes)

    def _profiler_count(self, problems: Sequence[Problem]) -> int:
        """The number of processes that profile call paths at once: one where a peer may autotune, as load would distort its
        times."""
        if any(one.kernel is not None and one.kernel.slow for one in self.rivals):
            return 1
        most_bytes = max(problem.min_bytes() for problem in problems)
        return max(1, min(_PROFILERS, len(problems), room_for(self.session.bench, _PROFILER_COPIES * most_bytes)))

    def _subjects_on(self, problem: Problem) -> tuple[Entry, ...]:
        """The subjects; on a drawn problem only the automatic choice, which is what a user gets."""
        if not self.request.as_dispatched:
            return self.subjects
        chosen = default_kernel(problem, self.gpu)
        return tuple(one for one in self.subjects if one.name == chosen)


class ProblemRun:
    """Measures one problem, which the worker has begun."""

    def __init__(self, on: OnProblem) -> None:
        self.on, self.session, self.gpu, self.problem = on, on.session, on.session.bench.gpu, on.problem
        self.contract, self.comparer = built_in(on.problem.op), Comparer(on)

    def go(self, subjects: Sequence[Entry], rivals: Sequence[Entry]) -> None:
        """Measure; rivals where a subject is right. Raises BudgetSpent between two steps when the deadline has passed."""
        right = self._right(subjects, True)
        alone = len({one.name for one in right}) == len(right)  # no configs to choose among by time
        if alone:
            right = [one for one in right if self._passes(one)]
        ours = [one for one in self._fastest(right) if alone or self._passes(one.entry)]
        if ours:
            self._timed(ours, self._fastest(self._right(rivals, False)))

    def _right(self, every: Sequence[Entry], are_subjects: bool) -> list[Entry]:
        """The configs of each that are right and launch what they promised."""
        request = self.session.request
        tried = [entry for one in every if self.on.serves(one) for entry in one.with_configs(self.problem, self.gpu, request)]
        return [one for one in tried if self.on.runs(one, examined_later=are_subjects and one.origin == "ours")]

    def _fastest(self, right: Sequence[Entry]) -> list[Timed]:
        """The fastest config of each, the fastest one first."""
        timed = self.comparer.ranked(right, "eager" if self.gpu is None else "graph")
        if timed:
            text = ", ".join(f"{one.entry}: {one.quick_ns:.0f} ns" for one in timed)
            self.session.note(f"quick bench ({timed[0].clock}): {text}", self.problem)
        best: dict[str, Timed] = {}
        for one in timed:
            best.setdefault(one.entry.name, one)
        return list(best.values())

    def _passes(self, entry: Entry) -> bool:
        """Whether a subject with its fastest config passes the full exam, that of a user's function. For a peer one call is
        enough, which it has passed."""
        if entry.origin == "peer":
            return True
        exam, found = self.on.exam(entry), Finding()
        try:
            workspace = entry.workspace(self.problem)
            found = exam.full(self.contract.distributions, self.contract.variants, True, workspace)
            if not found.reasons:
                found.reasons += exam.as_called()
        except Failed as error:
            found.fault("does-not-run", f"it does not run: {error}")
        return self.on.examined(entry, found)

    def _timed(self, subjects: Sequence[Timed], rivals: Sequence[Timed]) -> None:
        """Time the pairs on every clock. A subject that fails a check in a timed sample has no number on the problem."""
        mine = subjects[0].entry
        try:
            self.comparer.against(subjects, rivals)
            if self.gpu is not None:
                kernel, config = mine.kernel, Config.parse(mine.config)
                ours = kernel is not None and kernel.origin == "ours"
                if kernel and ours and not self.contract.user_call(kernel, config, self.problem, self.gpu):
                    text = "is called as planned; the public function would not choose this config here"
                    self.session.note(f"eager clock: {mine} {text}", self.problem, mine.name)
                self.comparer.eagerly(mine, [one.entry for one in rivals])
        except Unreliable as error:
            self.session.refuse(error.stage, str(error), self.problem, mine, voids=True)
        except Failed as error:
            self.on.refuse("timing", f"it does not run: {error}", mine)
