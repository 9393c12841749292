"""A run of a user's functions: each is loaded in a child, examined, timed against its rivals, refused by name where it fails.

This process keeps the records, the oracle and the deciding clocks; a function that damages its own process loses only its own
result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

from flashmoe_science.contract import DEFAULT, built_in
from flashmoe_science.measure.channel import Child, Died, Failed, Tampered, TooLittleMemory, Unusable, WorkerHost
from flashmoe_science.measure.check import Checked, Sweep, cannot_be_asked, problems_of, summary
from flashmoe_science.measure.compare import Unreliable
from flashmoe_science.measure.on_problem import Launches, OnProblem, ProfilerUnavailable, profile_launches
from flashmoe_science.measure.oracle import ContractFailed, oracle_of
from flashmoe_science.measure.promises import library_kernels
from flashmoe_science.measure.request import Entry, rivals_of
from flashmoe_science.measure.sandbox.checks import SandboxedComparer
from flashmoe_science.measure.sandbox.processes import Usage
from flashmoe_science.measure.session import BudgetSpent, Outcome, Session
from flashmoe_science.measure.worker.loading import files_digest
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import PromiseRow, Stage

_SWEEP_S = 30.0  # at most: the run is to time something
_MAX_OF_SWEEP = 3  # wrong answers of the sweep that are refused; the problems of the others are listed in a note


def run_functions(session: Session, problems: tuple[Problem, ...] | None, suite: str = "custom") -> Outcome:
    """Measure every function of the request in turn, each in a child of its own. ``problems`` of None are those of each
    function's contract. Returns the outcome; what the disk raises, it raises."""
    session.begin(suite)
    unusable, left = [], 0
    hosts: dict[str, WorkerHost] = {}  # of rivals alone, by contract
    try:
        with session.bench.single_threaded():
            for spec in session.request.functions:
                one = FunctionRun(session, spec, problems, hosts)
                try:
                    one.go()
                except Unusable as error:
                    unusable.append(f"{spec}: {error}")
                    for problem in one.left if problems else (None,):  # each that was named has its verdict
                        session.unusable(str(error), problem, spec)
                        if problem is not None:
                            session.finish(problem, spec)
                except BudgetSpent:
                    left += max(1, len(one.left))
    finally:
        for host in hosts.values():
            host.close()
    return session.end("; ".join(unusable) or None, left)


class FunctionRun:
    """Measures one function. ``problems`` of None are its contract's own. ``hosts`` are the processes without the function, by
    contract, where rivals are timed alone. ``left`` are the problems that are not finished."""

    def __init__(self, session: Session, spec: str, problems: tuple[Problem, ...] | None, hosts: dict[str, WorkerHost]) -> None:
        self.session, self.gpu, self.request = session, session.bench.gpu, session.request
        self.spec, self.entry = spec, Entry(spec, "")
        self.problems: Sequence[Problem] = ()
        self.left: list[Problem] = []
        self._hosts, self._host = hosts, WorkerHost(spec, "", self.request.watchdog_s)
        self._step = partial(session.step, of=spec)
        self._stage: Stage = "preflight"
        self._hung: str | None = None  # why it is asked nothing more
        self._ask_for(problems or ())

    def _ask_for(self, problems: Sequence[Problem]) -> None:
        self.problems, self.left = problems, self.session.earlier.remaining(self.spec, problems)
        self.session.total += len(self.left)

    def go(self) -> None:
        """Measure. Raises Unusable; BudgetSpent between two steps, when the deadline has passed."""
        if self.problems and not self.left:
            return
        with closing(self._host), ExitStack() as ends:
            self._go(ends)

    def _go(self, ends: ExitStack) -> None:
        self._step("loading")
        try:
            self._opened = self._host.open()
        except Tampered as error:
            if not self.problems:
                self._ask_for([parse_problem(str(one)) for one in built_in(DEFAULT).default_problems()])
            for problem in self.left:
                self.session.refuse("sanity", str(error), problem, self.entry, voids=True)
                self.session.finish(problem, self.spec)
            return
        self.promises = self._opened.promises
        self.session.add(
            PromiseRow(
                run=self.session.run,
                kernel=self.spec,
                launch=self.promises.kernel,
                source_digest=files_digest(self.spec, self.request.against),
                **self.promises.model_dump(include={"speedup", "threads", "deterministic"}),
            )
        )
        if self._host.imported:
            self._note(f"importing it changes global settings, which are set back: {'; '.join(self._host.imported)}")
        supported = self._prepared(ends)
        if not self.left:
            return
        if len(self.left) == len(self.problems):
            self._swept()
        self._paths = self._launched(supported)
        for problem in tuple(self.left):
            if problem in supported:
                self._one(problem)
            self.session.finish(problem, self.spec)
            self.left.remove(problem)

    def _note(self, text: str, problem: Problem | None = None) -> None:
        self.session.note(text, problem, self.spec)

    def _prepared(self, ends: ExitStack) -> list[Problem]:
        """Open the oracle and choose the rivals. Returns the problems left that it can be asked for. Raises Unusable."""
        op, watchdog_s = self._opened.contract, self.request.watchdog_s
        try:
            if not self.problems:
                self._ask_for(problems_of(self._opened.problems, "problems"))
            self.rivals = rivals_of(op, self._opened.rivals, self.request, self.gpu, [self.entry])
            self._oracle = ends.enter_context(oracle_of(self._opened, self.spec, self.session.bench.device, watchdog_s))
            cannot = {one: reason for one in self.left if (reason := cannot_be_asked(self._oracle, one, self.gpu)) is not None}
        except (ValueError, ContractFailed) as error:
            raise Unusable(str(error)) from error
        for problem, reason in cannot.items():
            self._note(reason, problem)
        if cannot and len(cannot) == len(self.problems):
            raise Unusable(f"it can be given none of the problems here: {'; '.join(dict.fromkeys(cannot.values()))}")
        name = op if self._opened.built_in else self.spec
        self._rivals_host = self._hosts.setdefault(name, WorkerHost(None, name, watchdog_s))
        return [problem for problem in self.left if problem not in cannot]

    def _swept(self) -> None:
        """Check the function on its contract's sweep, without the problems that are measured anyway. Its process then ends, so
        that no call is timed with caches of fifty shapes. A fault is refused on its problem of the sweep, not on those that
        are timed."""
        now = time.monotonic()
        deadline = now + min(_SWEEP_S, (self.session.deadline - now) / 4)
        bench, seed = self.session.bench, self.request.seed
        sweep = Sweep(bench, self._host.child, self._oracle, self._opened, seed, self._step, deadline)
        try:
            sweep.go(one for one in problems_of(self._opened.sweep, "sweep") if one not in self.problems)
        except ContractFailed as error:
            self._note(f"not checked on a sweep of tiny problems: {error}")
            return
        finally:
            self._host.close()
        if not sweep.checked:
            return
        self._note(f"checked on a sweep of tiny problems (flashmoe check shows them): {summary(sweep.checked, sweep.stopped)}")
        self._refuse_on_sweep([one for one in sweep.checked if one.answer == "wrong"])
        if any("hangs" in one.codes for one in sweep.checked):
            self._hung = sweep.stopped

    def _refuse_on_sweep(self, wrong: Sequence[Checked]) -> None:
        """Refuse a few wrong answers, one of each kind first; the problems of the others are listed in a note."""
        kinds = {one.codes: one for one in reversed(wrong)}
        first = list(dict.fromkeys((*reversed(kinds.values()), *wrong)))[:_MAX_OF_SWEEP]
        for one in first:
            stage: Stage = "sanity" if "tampers" in one.codes else "correctness"
            self.session.refuse(stage, one.words, one.problem, self.entry, voids=True, codes=one.codes)
        shown = {one.problem for one in first}
        others = ", ".join(f"'{problem}'" for problem in dict.fromkeys(one.problem for one in wrong) if problem not in shown)
        if others:
            self._note(f"it is wrong on these of the sweep too: {others}")

    def _launched(self, problems: Sequence[Problem]) -> Launches:
        if self.gpu is None:  # a CPU launches no kernels
            return {}
        todo = []
        for problem in problems:
            supported = [one for one in self.rivals if one.cannot(problem, self.gpu) is None]
            todo.append((problem, [("", ""), *((one.who, one.chosen(problem, self.gpu).config) for one in supported)]))
        try:
            return profile_launches(self.spec, "", todo, self.request.seed, self.request.watchdog_s, self._step)
        except ProfilerUnavailable as error:
            raise Unusable(str(error)) from error

    def _one(self, problem: Problem) -> None:
        """Measure one problem; an error ends this problem only."""

        def refuse(stage: Stage, reason: str, *codes: str) -> None:
            self.session.refuse(stage, reason, problem, self.entry, voids=True, codes=codes)

        if self._hung is not None:
            refuse("correctness", self._hung)
            return
        self._stage = "correctness"
        try:
            self._measure(self._host.child(), problem)
        except Tampered as error:
            refuse("sanity", str(error), error.code)
        except Unreliable as error:
            refuse(error.stage, str(error))
        except TooLittleMemory as error:
            refuse("sanity", str(error))
        except Failed as error:
            refuse(self._stage, f"it does not run: {error} ({self.session.doing})", "does-not-run")
        except (Died, ContractFailed) as error:
            refuse(self._stage, f"{error} ({self.session.doing})", error.code)
            if error.code == "hangs":
                self._hung = f"not asked: it hung on '{problem}'"
        else:
            return
        self._host.close()  # whatever it left behind, a poisoned CUDA context or a thread, ends with it

    def _measure(self, child: Child, problem: Problem) -> None:
        on = OnProblem.begin(self.session, problem, child, self._oracle, self._paths, self.spec)
        child.drain()  # what is of its rivals, timed before
        opened, deterministic = self._opened, self.promises.deterministic
        if not on.examined(self.entry, on.exam(self.entry).full(opened.distributions, opened.variants, deterministic)):
            child.close()  # what it left running would disturb whatever comes next
            return
        for launches in self._paths.get((str(problem), "", ""), []):
            for note in library_kernels(launches, on.families):
                self._note(note, problem)
        if not on.keeps_its_promise(self.entry, self.promises.launches):
            return
        on.rivals_worker = self._rivals_host.at(problem)
        supported = [rival.chosen(problem, self.gpu) for rival in self.rivals if on.serves(rival)]
        rivals = [rival for rival in supported if self._rival_runs(on, rival)]
        self._stage = "timing"
        comparer, usage = SandboxedComparer(on), Usage(child, one_thread=self.gpu is None)
        comparer.go(self.entry, rivals)
        settings, _ = child.drain()
        if settings:
            raise Unreliable("sanity", f"it left settings changed while it was timed: {'; '.join(settings)}")
        if (too_much := usage.too_much()) is not None:
            raise Unreliable("timing", too_much)
        best = comparer.against_best
        if best is not None and (broken := self.promises.speedup_missed(*best)) is not None:
            self.session.refuse("promise", broken, problem, self.entry)

    def _rival_runs(self, on: OnProblem, rival: Entry) -> bool:
        """Whether a rival is right, and launches what it promised, in a process without the function."""
        try:
            if on.runs(rival, on.rivals_worker):
                return True
        except Died as error:
            on.refuse("callpath", f"it does not run: {error}", rival)
        self._rivals_host.close()  # a poisoned CUDA context ends with it
        on.rivals_worker = self._rivals_host.at(on.problem)
        return False
