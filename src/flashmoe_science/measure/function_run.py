"""A function that a user brought: loaded in a child, examined, timed against its rivals, refused by name where it fails.

This process keeps the records, the oracle and the clocks that decide; whatever the function does to its own process costs the
function its number and nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from flashmoe_science.contract import DEFAULT, Contract, built_in
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.channel import Child, Died, Failed, Hung
from flashmoe_science.measure.check import Checked, Sweep, sweep_problems
from flashmoe_science.measure.compare import Clocked, Untrue, input_sets
from flashmoe_science.measure.correctness import Exam, Finding, Promised
from flashmoe_science.measure.function_child import (
    ContractFailed,
    FunctionChild,
    FunctionHome,
    Tampered,
    Unusable,
    oracle_of,
)
from flashmoe_science.measure.implementation import Entry, Implementation, of_function, rivals_of
from flashmoe_science.measure.launches.look import Blind, Launches, look
from flashmoe_science.measure.launches.promised import broken_launches
from flashmoe_science.measure.problem_run import BudgetSpent, Effort
from flashmoe_science.measure.promises import Promises, borrowed
from flashmoe_science.measure.recorder import Recorder
from flashmoe_science.measure.request import MOST_CPU_FLOPS
from flashmoe_science.measure.sandbox.checks import SandboxedComparer
from flashmoe_science.measure.sandbox.usage import Usage
from flashmoe_science.measure.sanitizer import remarks_on, sanitize
from flashmoe_science.measure.worker.loading import files_digest, functions_beside
from flashmoe_science.measure.worker.worker import MODULE as WORKER
from flashmoe_science.operations import is_operation, operation, parse_problem
from flashmoe_science.problem import Problem, ProblemError
from flashmoe_science.records import Stage

_SWEEP_S = 30.0  # at most, of a run that is to time something
_MOST_OF_SWEEP = 3  # wrong answers of the sweep that are refused by problem; the others are named


class RivalChildren:
    """Children without a function, where rivals show what they can do: one for each contract, started when it is needed."""

    def __init__(self, watchdog_s: float) -> None:
        self._watchdog_s = watchdog_s
        self._children: dict[str, Child] = {}

    def get(self, contract: str) -> Child:
        """The child of a contract: an operation's name, or the function that names its own. Raises Failed, Died."""
        child = self._children.get(contract)
        if child is None or not child.alive:
            child = self._children[contract] = Child(WORKER, self._watchdog_s)
            child.ask("open", spec=None, contract=contract)
        return child

    def close(self) -> None:
        for child in self._children.values():
            child.close()


@dataclass(frozen=True, slots=True)
class FunctionRequest:
    """What is measured of a function. ``problems`` of None are its contract's own; ``done`` are those to leave out."""

    spec: str
    problems: tuple[Problem, ...] | None
    against: tuple[str, ...]
    every: bool
    effort: Effort
    watchdog_s: float
    sanitize: bool = False
    sweep: bool = True
    done: frozenset[str] = frozenset()


class FunctionRun:
    """Puts one function through everything. ``tell(text)`` shows where it stands."""

    def __init__(
        self,
        bench: Bench,
        request: FunctionRequest,
        recorder: Recorder,
        rival_children: RivalChildren,
        tell: Callable[[str], None],
    ) -> None:
        self.bench, self.request, self.recorder, self._tell = bench, request, recorder, tell
        self._rival_children = rival_children
        self.entry = Entry(of_function(request.spec), "")
        self.problems: tuple[Problem, ...] = request.problems or ()
        self.finished = 0
        self._opened: dict[str, Any] = {}
        self._stage: Stage = "preflight"
        self._doing = ""
        self._home = FunctionHome(request.spec, request.watchdog_s)
        self._hung: str | None = None  # why it is asked nothing more
        self._cannot: list[str] = []  # why it was not asked for a problem

    def go(self) -> None:
        """Measure.

        Raises:
            Unusable: it cannot be loaded, or is asked for what no contract of its has.
            BudgetSpent: between two steps, when the deadline has passed.
        """
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
            self._refuse_all("sanity", str(error))
            return
        try:
            self.promises = Promises.of(self._opened["promises"])
        except ValueError as error:
            raise Unusable(str(error)) from error
        source = files_digest(functions_beside(self.request.spec, self.request.against))
        self.recorder.add(self.promises.row(self.recorder.run, self.request.spec, source))
        if self._home.imported:
            text = f"importing it changes global settings, which are set back: {'; '.join(self._home.imported)}"
            self.recorder.note(text, kernel=self.request.spec)
        left = self._prepared(ends)
        if self.request.sweep and not self.request.done:
            self._swept()
        able = [problem for problem in left if str(problem) not in self._cannot_texts]
        self._paths: Launches = {}
        if self.bench.gpu is not None:  # a CPU launches no kernels
            self._paths = self._launched(able)
        faults = self._sanitized(min(able, key=lambda one: one.flops())) if able and self.request.sanitize else []
        for problem in left:
            if problem in able and faults:
                self._refuse("correctness", "; ".join(faults), problem)
            elif problem in able:
                self._one(problem)
            self.recorder.done(problem, self.request.spec)
            self.finished += 1

    def _swept(self) -> None:
        """Check it on its contract's sweep, but for what is measured anyway, in a process that then ends: what it keeps of
        fifty shapes is not timed. What is wrong there is refused there; the problems that are timed go on."""
        effort, spec = self.request.effort, self.request.spec
        allowed = _SWEEP_S if effort.deadline is None else min(_SWEEP_S, (effort.deadline - time.monotonic()) / 4)
        deadline = time.monotonic() + allowed
        sweep = Sweep(self.bench, self._home.child, self._oracle, self._opened, effort.seed, self._step, deadline)
        try:
            problems = [one for one in sweep_problems(self._opened) if one not in self.problems]
            if not problems:
                return
            sweep.go(problems)
        except ContractFailed as error:
            self.recorder.note(f"not checked on a sweep of tiny problems: {error}", kernel=spec)
            return
        finally:
            self._home.close()
        words = f"checked on a sweep of tiny problems (flashmoe check shows them): {sweep.summary()}"
        self.recorder.note(words, kernel=spec)
        self._refuse_on_sweep(sweep.checked)
        if any("hangs" in one.codes for one in sweep.checked):
            self._hung = sweep.stopped

    def _refuse_on_sweep(self, checked: Sequence[Checked]) -> None:
        """A refusal for a few problems of the sweep that it is wrong on, one of each kind first; the others are named."""
        wrong: dict[Problem, list[Checked]] = {}
        kinds: dict[tuple[str, ...], Problem] = {}
        for one in checked:
            if one.answer == "wrong":
                wrong.setdefault(one.problem, []).append(one)
                kinds.setdefault(one.codes, one.problem)
        order = list(dict.fromkeys((*kinds.values(), *wrong)))
        for problem in order[:_MOST_OF_SWEEP]:
            codes = list(dict.fromkeys(code for one in wrong[problem] for code in one.codes))
            stage: Stage = "sanity" if "tampers" in codes else "correctness"
            self._refuse(stage, "; ".join(one.words for one in wrong[problem]), problem, codes)
        others = ", ".join(f"'{problem}'" for problem in order[_MOST_OF_SWEEP:])
        if others:
            self.recorder.note(f"it is wrong on these of the sweep too: {others}", kernel=self.request.spec)

    def _prepared(self, ends: ExitStack) -> list[Problem]:
        """Open the oracle and choose the rivals. Returns the problems that are left to do. Raises Unusable."""
        op = self._opened["contract"]
        known = is_operation(op) and bool(self._opened["built_in"])
        self._contract_name = op if known else self.request.spec
        self.contract: Contract | None = built_in(op) if known else None
        if self.request.problems is None:
            self.problems = self._default_problems()
        left = [problem for problem in self.problems if str(problem) not in self.request.done]
        self.finished = len(self.problems) - len(left)
        self._cannot_texts: set[str] = set()
        try:
            self.rivals = rivals_of(
                op,
                self._opened["rivals"],
                self.request.against,
                self.request.every,
                self.bench.gpu,
                [self.entry.implementation],
            )
            if not self.rivals:
                raise ValueError(f"--against leaves no rival for {self.request.spec}; name another")
            self._oracle = ends.enter_context(
                oracle_of(self._opened, self.request.spec, self.bench.device, self.request.watchdog_s)
            )
            for problem in left:
                self._ask_for(problem)
        except (ValueError, ContractFailed, Failed, Died) as error:
            raise Unusable(str(error)) from error
        if left and len(self._cannot_texts) == len(left) and not self.finished:
            raise Unusable(f"it can be asked for none of the problems here: {'; '.join(dict.fromkeys(self._cannot))}")
        return left

    def _ask_for(self, problem: Problem) -> None:
        """Note why the function cannot be asked for a problem, where that is so."""
        reason = self._oracle.ask("problem", text=str(problem))["cannot"]
        if reason is None and self.bench.gpu is None and problem.flops() > MOST_CPU_FLOPS:
            reason = "too much for a CPU, and there is no GPU here"
        if reason is not None:
            self._cannot.append(str(reason))
            self._cannot_texts.add(str(problem))
            self.recorder.note(str(reason), problem, self.request.spec)

    def _sanitized(self, problem: Problem) -> list[str]:
        """What compute-sanitizer has against one call on the problem, in words. No kernel gets a number anywhere that does
        what it may not do somewhere."""
        spec = self.request.spec
        if self.bench.gpu is None:
            self.recorder.note("compute-sanitizer was not run: there is no GPU here", kernel=spec)
            return []
        looked = sanitize(spec, "", problem, self.request.effort.seed, lambda text: self._step(text, problem))
        for note in remarks_on(looked):
            self.recorder.note(note, problem, spec)
        return [f"{one.fault} (in one call on {problem})" for one in looked if one.fault is not None]

    def _default_problems(self) -> tuple[Problem, ...]:
        try:
            return tuple(dict.fromkeys(parse_problem(text) for text in self._opened["problems"]))
        except ProblemError as error:
            raise Unusable(f"its contract's default problems: {error}") from error

    def _one(self, problem: Problem) -> None:
        """Everything on one problem; whatever goes wrong ends this problem only."""
        if self._hung is not None:
            self._refuse("correctness", self._hung, problem)
            return
        self._stage = "correctness"
        try:
            self._measure(self._home.child(), problem)
        except Tampered as error:
            self._refuse("sanity", str(error), problem, ("tampers",))
        except Untrue as error:
            self._refuse(error.stage, str(error), problem)
        except Failed as error:
            self._refuse(self._stage, f"it does not run: {error} ({self._doing})", problem, ("does-not-run",))
        except (Died, ContractFailed) as error:
            code = "hangs" if isinstance(error, Hung) else "contract-fails" if isinstance(error, ContractFailed) else "crashes"
            self._refuse(self._stage, f"{error} ({self._doing})", problem, (code,))
            if isinstance(error, Hung):
                self._hung = f"not asked: it hung on '{problem}'"
        else:
            return
        self._home.close()  # whatever it left behind, a poisoned CUDA context or a thread, ends with it

    def _measure(self, home: FunctionChild, problem: Problem) -> None:
        seen = (str(problem), "", "") in self._paths
        if seen and not self._path_row(problem, self.entry):
            return
        asked = self._oracle.ask("problem", text=str(problem))
        home.ask("problem", text=str(problem))
        if not self._correct(home, problem):
            home.close()  # what it left running would disturb whatever comes next
            return
        if not seen and not self._path_row(problem, self.entry):
            return  # it ran here, and not where its call path was looked at
        self._begin_alone(problem)
        rivals = [entry for rival in self.rivals if (entry := self._able(rival, problem)) is not None]
        self._stage = "timing"
        comparer = self._comparer(home, problem, int(asked["input_bytes"]))
        usage = Usage(home.child, one_thread=self.bench.gpu is None)
        comparer.go(self.entry, rivals)
        if home.settings:
            raise Untrue("sanity", f"it left settings changed while it was timed: {'; '.join(dict.fromkeys(home.settings))}")
        too_much = usage.too_much()
        if too_much is not None:
            raise Untrue("timing", too_much)
        if comparer.against_best is not None:
            broken = self.promises.speedup_missed(*comparer.against_best)
            if broken is not None:
                self.recorder.refuse("promise", broken, problem, self.entry)

    def _comparer(self, home: FunctionChild, problem: Problem, input_bytes: int) -> SandboxedComparer:
        sets, cache = input_sets(self.bench.gpu, input_bytes)
        op = self._opened["contract"]
        return SandboxedComparer(
            Clocked(
                bench=self.bench,
                problem=problem,
                recorder=self.recorder,
                worker=home,
                rivals_alone=self._alone,
                oracle=self._oracle,
                quick=self.request.effort.quick,
                seed=self.request.effort.seed + 10**6,
                sets=sets,
                cache=cache,
                framework=operation(op).fallback() if is_operation(op) else None,
                step=lambda text: self._step(text, problem),
            )
        )

    def _exam(self, worker: FunctionChild | Child, entry: Entry, problem: Problem) -> Exam:
        effort = self.request.effort
        return Exam(
            worker,
            self._oracle,
            entry.who,
            entry.config,
            effort.seed,
            self.bench.gpu is not None,
            lambda text: self._step(text, problem),
            effort.repeats,
        )

    def _correct(self, home: FunctionChild, problem: Problem) -> bool:
        """The exam of the function, its row, and its refusal where it fails."""
        home.take_remarks()  # of what was timed before, its rivals among it
        promised = Promised(self.promises.deterministic)
        found = self._exam(home, self.entry, problem).whole(self._opened["distributions"], self._opened["variants"], promised)
        found.left_behind(home.take_settings(), home.take_remarks())
        for note in found.notes:
            self.recorder.note(note, problem, self.request.spec)
        self.recorder.correctness(problem, self.entry, found)
        if found.reasons:
            self._refuse("correctness", "; ".join(found.reasons), problem, found.codes)
        return not found.reasons

    def _able(self, rival: Implementation, problem: Problem) -> Entry | None:
        """The rival as it is measured, where it serves the problem and is right in a process without the function."""
        reason = rival.cannot(problem, self.bench.gpu)
        if reason is not None:
            self.recorder.note(reason, problem, rival.name)
            return None
        entry = Entry(rival, rival.chosen_config(problem, self.bench.gpu))
        self._step(f"checking {entry}", problem)
        try:
            found = self._exam(self._alone, entry, problem).glance()
        except (Failed, Died) as error:
            found = Finding(reasons=[f"it does not run: {error}"])
            self._alone.close()  # a poisoned CUDA context ends with it
            self._begin_alone(problem)
        self.recorder.correctness(problem, entry, found)
        if found.reasons:
            self.recorder.refuse("correctness", "; ".join(found.reasons), problem, entry, codes=found.codes)
            return None
        return entry if self._path_row(problem, entry) else None

    def _begin_alone(self, problem: Problem) -> None:
        """Have the child without the function at this problem, in a new one where there is none (any more)."""
        self._alone = self._rival_children.get(self._contract_name)
        self._alone.ask("problem", text=str(problem))

    def _launched(self, problems: Sequence[Problem]) -> Launches:
        todo = []
        for problem in problems:
            able = [one for one in self.rivals if one.cannot(problem, self.bench.gpu) is None]
            named = [(one.who, one.chosen_config(problem, self.bench.gpu)) for one in able]
            todo.append((problem, [("", ""), *named]))
        try:
            return look(
                self.request.spec,
                "",
                todo,
                self.request.effort.seed,
                self.request.watchdog_s,
                lambda index, problem: self._step("call path", problem),
            )
        except Blind as error:
            raise Unusable(str(error)) from error

    def _path_row(self, problem: Problem, entry: Entry) -> bool:
        """Record what a call launched and hold it to what was promised of it. Returns whether it may go on."""
        if self.bench.gpu is None:
            return True
        seen = self._paths.get((str(problem), entry.who, entry.config), [])
        launches = seen[0] if seen else []
        families: Mapping[str, str] = {} if self.contract is None else self.contract.families
        if not launches:
            broken = ["no kernel was seen"]
        elif not entry.who:
            broken = self.promises.broken(launches, families)
        else:
            promised = entry.implementation.promised(problem, entry.config, self.bench.gpu)
            broken = broken_launches(promised, seen, entry.implementation.origin if promised else "candidate", families)
        self.recorder.callpath(problem, entry, launches, broken)
        if not entry.who:
            for note in borrowed(launches, families):
                self.recorder.note(note, problem, self.request.spec)
            if broken:
                self._refuse("callpath", "; ".join(broken), problem)
        return not broken

    def _step(self, text: str, problem: Problem | None = None) -> None:
        deadline = self.request.effort.deadline
        if deadline is not None and time.monotonic() > deadline:
            raise BudgetSpent
        self._doing = text
        self._tell(f"{self.request.spec}{f' on {problem}' if problem is not None else ''}: {text}")

    def _refuse(self, stage: Stage, reason: str, problem: Problem, codes: Sequence[str] = ()) -> None:
        self.recorder.refuse(stage, reason, problem, self.entry, voids=True, codes=codes)

    def _refuse_all(self, stage: Stage, reason: str) -> None:
        for problem in self.problems or tuple(parse_problem(text) for text in built_in(DEFAULT).default_problems()):
            if str(problem) not in self.request.done:
                self._refuse(stage, reason, problem)
                self.recorder.done(problem, self.request.spec)
