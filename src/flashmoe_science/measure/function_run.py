"""A function that a user brought: loaded in a child, examined, timed against its rivals, refused by name where it fails.

This process keeps the records, the oracle and the clocks that decide; whatever the function does to its own process costs the
function its number and nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from flashmoe_science.contract import DEFAULT, built_in
from flashmoe_science.measure.channel import Died, Failed, Home
from flashmoe_science.measure.check import Checked, Sweep, cannot_be_asked, code_of, problems_of, summary
from flashmoe_science.measure.compare import Untrue
from flashmoe_science.measure.finding import Finding, Promised
from flashmoe_science.measure.function_child import ContractFailed, FunctionChild, FunctionHome, Tampered, Unusable, oracle_of
from flashmoe_science.measure.on_problem import Blind, Launches, OnProblem, look
from flashmoe_science.measure.promises import Promises, borrowed
from flashmoe_science.measure.request import Entry, Implementation, of_function, rivals_of
from flashmoe_science.measure.sandbox.checks import SandboxedComparer
from flashmoe_science.measure.sandbox.processes import Usage
from flashmoe_science.measure.session import Session
from flashmoe_science.measure.worker.loading import files_digest, functions_beside
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import Stage

_SWEEP_S = 30.0  # at most, of a run that is to time something
_MOST_OF_SWEEP = 3  # wrong answers of the sweep that are refused by problem; the others are named


class FunctionRun:
    """Puts one function through everything. ``problems`` of None are its contract's own. ``homes`` are the processes without
    it, by contract, where rivals show what they can do."""

    def __init__(self, session: Session, spec: str, problems: tuple[Problem, ...] | None, homes: dict[str, Home]) -> None:
        self.session, self.bench, self.request = session, session.bench, session.request
        self.spec, self.entry = spec, Entry(of_function(spec), "")
        self.problems: tuple[Problem, ...] = problems or ()
        self.finished = 0
        self._homes = homes
        self._before = session.earlier.of_kernel(spec)  # problems that are done
        self._opened: dict[str, Any] = {}
        self._stage: Stage = "preflight"
        self._doing = ""
        self._home = FunctionHome(spec, self.request.watchdog_s)
        self._hung: str | None = None  # why it is asked nothing more

    def go(self) -> None:
        """Measure.

        Raises:
            Unusable: it cannot be loaded, or is asked for what no contract of its has.
            BudgetSpent: between two steps, when the deadline has passed.
        """
        if self.problems and self._before >= {str(problem) for problem in self.problems}:
            return
        try:
            with ExitStack() as ends:
                self._go(ends)
        finally:
            self._home.close()

    def _go(self, ends: ExitStack) -> None:
        self._step("loading")
        try:
            self._opened = self._home.open()
        except Tampered as error:
            for problem in self._left() or map(parse_problem, map(str, built_in(DEFAULT).default_problems())):
                self.session.refuse("sanity", str(error), problem, self.entry, voids=True)
                self.session.finish(problem, self.spec)
            return
        try:
            self.promises = Promises.of(self._opened["promises"])
        except ValueError as error:
            raise Unusable(str(error)) from error
        source = files_digest(functions_beside(self.spec, self.request.against))
        self.session.add(self.promises.row(self.session.run, self.spec, source))
        if self._home.imported:
            self._note(f"importing it changes global settings, which are set back: {'; '.join(self._home.imported)}")
        left, able = self._prepared(ends)
        if self.request.sweep and not self._before:
            self._swept()
        self._paths = self._launched(able)
        for problem in left:
            if problem in able:
                self._one(problem)
            self.session.finish(problem, self.spec)
            self.finished += 1
            self.session.done += 1

    def _left(self) -> list[Problem]:
        return [problem for problem in self.problems if str(problem) not in self._before]

    def _note(self, text: str, problem: Problem | None = None) -> None:
        self.session.note(text, problem, self.spec)

    def _swept(self) -> None:
        """Check it on its contract's sweep, but for what is measured anyway, in a process that then ends: what it keeps of
        fifty shapes is not timed. What is wrong there is refused there; the problems that are timed go on."""
        now = time.monotonic()
        deadline = now + min(_SWEEP_S, (self.session.deadline - now) / 4)
        sweep = Sweep(self.bench, self._home.child, self._oracle, self._opened, self.request.seed, self._step, deadline)
        try:
            problems = [one for one in problems_of(self._opened, "sweep") if one not in self.problems]
            if not problems:
                return
            sweep.go(problems)
        except ContractFailed as error:
            self._note(f"not checked on a sweep of tiny problems: {error}")
            return
        finally:
            self._home.close()
        self._note(f"checked on a sweep of tiny problems (flashmoe check shows them): {summary(sweep.checked, sweep.stopped)}")
        self._refuse_on_sweep(sweep.checked)
        if any("hangs" in one.codes for one in sweep.checked):
            self._hung = sweep.stopped

    def _refuse_on_sweep(self, checked: Sequence[Checked]) -> None:
        """A refusal for a few wrong answers, one of each kind first; the problems of the others are named."""
        wrong = [one for one in checked if one.answer == "wrong"]
        kinds = {one.codes: one for one in reversed(wrong)}
        first = list(dict.fromkeys((*reversed(kinds.values()), *wrong)))[:_MOST_OF_SWEEP]
        for one in first:
            stage: Stage = "sanity" if "tampers" in one.codes else "correctness"
            self.session.refuse(stage, one.words, one.problem, self.entry, voids=True, codes=one.codes)
        told = {one.problem for one in first}
        others = ", ".join(f"'{problem}'" for problem in dict.fromkeys(one.problem for one in wrong) if problem not in told)
        if others:
            self._note(f"it is wrong on these of the sweep too: {others}")

    def _prepared(self, ends: ExitStack) -> tuple[list[Problem], list[Problem]]:
        """Open the oracle and choose the rivals. Returns the problems that are left to do, and those of them that it can be
        asked for. Raises Unusable."""
        op, watchdog_s = self._opened["contract"], self.request.watchdog_s
        try:
            if not self.problems:
                self.problems = tuple(problems_of(self._opened, "problems"))
                self.session.total += len(self.problems) - 1
            left = self._left()
            self.finished = len(self.problems) - len(left)
            self.session.done += self.finished
            self.rivals = rivals_of(
                op, self._opened["rivals"], self.request.against, self.request.full, self.bench.gpu, [self.entry.implementation]
            )
            if not self.rivals:
                raise ValueError(f"--against leaves no rival for {self.spec}; name another")
            self._oracle = ends.enter_context(oracle_of(self._opened, self.spec, self.bench.device, watchdog_s))
            cannot = {one: reason for one in left if (reason := cannot_be_asked(self._oracle, one, self.bench)) is not None}
        except (ValueError, ContractFailed, Failed, Died) as error:
            raise Unusable(str(error)) from error
        for problem, reason in cannot.items():
            self._note(reason, problem)
        if left and len(cannot) == len(left) and not self.finished:
            raise Unusable(f"it can be asked for none of the problems here: {'; '.join(dict.fromkeys(cannot.values()))}")
        name = op if self._opened["built_in"] else self.spec
        self._alone = self._homes.setdefault(name, Home(None, name, watchdog_s))
        return left, [problem for problem in left if problem not in cannot]

    def _launched(self, problems: Sequence[Problem]) -> Launches:
        if self.bench.gpu is None:  # a CPU launches no kernels
            return {}
        todo = []
        for problem in problems:
            able = [one for one in self.rivals if one.cannot(problem, self.bench.gpu) is None]
            todo.append((problem, [("", ""), *((one.who, one.chosen_config(problem, self.bench.gpu)) for one in able)]))
        try:
            return look(self.spec, "", todo, self.request.seed, self.request.watchdog_s, self._step)
        except Blind as error:
            raise Unusable(str(error)) from error

    def _one(self, problem: Problem) -> None:
        """Everything on one problem; whatever goes wrong ends this problem only."""

        def refuse(stage: Stage, reason: str, *codes: str) -> None:
            self.session.refuse(stage, reason, problem, self.entry, voids=True, codes=codes)

        if self._hung is not None:
            refuse("correctness", self._hung)
            return
        self._stage = "correctness"
        try:
            self._measure(self._home.child(), problem)
        except Tampered as error:
            refuse("sanity", str(error), code_of(error))
        except Untrue as error:
            refuse(error.stage, str(error))
        except Failed as error:
            refuse(self._stage, f"it does not run: {error} ({self._doing})", "does-not-run")
        except (Died, ContractFailed) as error:
            code = code_of(error)
            refuse(self._stage, f"{error} ({self._doing})", code)
            if code == "hangs":
                self._hung = f"not asked: it hung on '{problem}'"
        else:
            return
        self._home.close()  # whatever it left behind, a poisoned CUDA context or a thread, ends with it

    def _measure(self, home: FunctionChild, problem: Problem) -> None:
        asked = self._oracle.ask("problem", text=str(problem))
        home.ask("problem", text=str(problem))
        on = OnProblem(
            session=self.session,
            problem=problem,
            worker=home,
            rivals_alone=home,
            oracle=self._oracle,
            input_bytes=int(asked["input_bytes"]),
            step=lambda text: self._step(text, problem),
            launches=self._paths,
        )
        seen = (str(problem), "", "") in self._paths
        if seen and not self._launches_as_promised(on):
            return
        if not self._correct(on, home):
            home.close()  # what it left running would disturb whatever comes next
            return
        if not seen and not self._launches_as_promised(on):
            return  # it ran here, and not where its call path was looked at
        on.rivals_alone = self._alone.at(problem)
        rivals = [entry for rival in self.rivals if (entry := self._able(on, rival)) is not None]
        self._stage = "timing"
        comparer, usage = SandboxedComparer(on), Usage(home, one_thread=self.bench.gpu is None)
        comparer.go(self.entry, rivals)
        if home.settings:
            raise Untrue("sanity", f"it left settings changed while it was timed: {'; '.join(dict.fromkeys(home.settings))}")
        too_much = usage.too_much()
        if too_much is not None:
            raise Untrue("timing", too_much)
        if comparer.against_best is not None:
            broken = self.promises.speedup_missed(*comparer.against_best)
            if broken is not None:
                self.session.refuse("promise", broken, problem, self.entry)

    def _correct(self, on: OnProblem, home: FunctionChild) -> bool:
        """The exam of the function, its row, and its refusal where it fails."""
        home.remarks.clear()  # of what was timed before, its rivals among it
        promised = Promised(self.promises.deterministic)
        found = on.exam(self.entry).whole(self._opened["distributions"], self._opened["variants"], promised)
        found.left_behind(*home.take())
        return on.examined(self.entry, found)

    def _able(self, on: OnProblem, rival: Implementation) -> Entry | None:
        """The rival as it is measured, where it serves the problem and is right in a process without the function."""
        reason = rival.cannot(on.problem, self.bench.gpu)
        if reason is not None:
            self.session.note(reason, on.problem, rival.name)
            return None
        entry = Entry(rival, rival.chosen_config(on.problem, self.bench.gpu))
        on.step(f"checking {entry}")
        try:
            found = on.exam(entry, on.rivals_alone).glance()
        except (Failed, Died) as error:
            found = Finding(reasons=[f"it does not run: {error}"])
            self._alone.close()  # a poisoned CUDA context ends with it
            on.rivals_alone = self._alone.at(on.problem)
        return entry if on.examined(entry, found) and on.keeps_its_promise(entry) else None

    def _launches_as_promised(self, on: OnProblem) -> bool:
        for launches in self._paths.get((str(on.problem), "", ""), []):
            for note in borrowed(launches, on.families):
                self._note(note, on.problem)
        return on.keeps_its_promise(self.entry, self.promises.launches)

    def _step(self, text: str, problem: Problem | None = None) -> None:
        self._doing = text
        self.session.step(f"{self.spec}{f' on {problem}' if problem is not None else ''}: {text}")
