"""One candidate on trial: loaded in a process of its own, examined, timed against its rivals, refused by name where it fails.

This process keeps the records, the oracle and the clocks that decide; whatever the candidate does to its own process, it costs
the candidate its number and nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe_science.contract import ATTENTION, BUILT_IN
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Launch
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.callpath import broken_promises
from flashmoe_science.measure.choice import MOST_CPU_FLOPS
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.measure.round import BudgetSpent
from flashmoe_science.measure.suites import suite
from flashmoe_science.measure.trial.battery import Battery
from flashmoe_science.measure.trial.contest import Contest, Untrue
from flashmoe_science.measure.trial.docket import Docket
from flashmoe_science.measure.trial.launched import Blind, Launches, launched
from flashmoe_science.measure.trial.loading import candidates_beside, files_digest
from flashmoe_science.measure.trial.parties import (
    HOST,
    REFEREE,
    CleanRoom,
    ContractFailed,
    Oracle,
    Tampered,
    Watched,
    introduced,
)
from flashmoe_science.measure.trial.promises import Promises, remarks
from flashmoe_science.measure.trial.referee import Referee
from flashmoe_science.measure.trial.rivals import Rival, rivals_of
from flashmoe_science.measure.trial.sanitizer import remarks_on, sanitize
from flashmoe_science.measure.trial.usage import Usage
from flashmoe_science.measure.trial.warden import Answers, Died, Failed, InProcess, Ward
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem, ProblemError
from flashmoe_science.records import Origin, Stage


class Unusable(Exception):
    """A candidate that cannot be put on trial at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a trial measures. ``problems`` of None are the contract's own."""

    spec: str
    problems: tuple[Problem, ...] | None
    against: tuple[str, ...]
    every: bool
    quick: bool
    seed: int
    repeats: int
    watchdog_s: float
    deadline: float | None  # on time.monotonic's clock
    done: frozenset[str] = frozenset()  # problems that an earlier part of the run is through with
    sanitize: bool = False  # look at one call with compute-sanitizer
    begun: bool = False  # an earlier part of the run holds its promises


class Trial:
    """Puts one candidate through everything. ``tell(text)`` shows where it stands."""

    def __init__(self, bench: Bench, asked: Asked, ledger: Ledger, clean_room: CleanRoom, tell: Callable[[str], None]) -> None:
        self.bench, self.asked, self.ledger, self._clean_room, self._tell = bench, asked, ledger, clean_room, tell
        self.docket = Docket(ledger, asked.spec)
        self.problems: tuple[Problem, ...] = asked.problems or ()
        self.finished = 0
        self._opened: dict[str, Any] = {}
        self._stage: Stage = "preflight"
        self._doing = ""
        self._host: Watched | None = None
        self._wards: list[Ward] = []
        self._unserved: list[str] = []  # why it was not asked for a problem

    def go(self) -> None:
        """The trial.

        Raises:
            Unusable: it cannot be loaded, or is asked for what nobody has.
            BudgetSpent: between two steps, when the deadline has passed.
        """
        try:
            self._go()
        finally:
            for ward in self._wards:
                ward.close()

    def _go(self) -> None:
        spec, source = self.asked.spec, self._source_digest()
        self._step("loading")
        try:
            host = self._fresh_host()
        except (Failed, Died) as error:
            raise Unusable(f"it could not be loaded: {error}") from error
        except Tampered as error:
            self._refuse_all("sanity", str(error))
            return
        op, built_in = self._opened["contract"], self._opened["contract"] in BUILT_IN and self._opened["built_in"]
        try:
            self.promises = Promises.of(self._opened["promises"])
        except ValueError as error:
            raise Unusable(str(error)) from error
        if not self.asked.begun:
            self.ledger.add(self.promises.row(self.ledger.run, spec, source))
        if host.settings:
            self.docket.note(f"importing it changes PyTorch's settings, which are set back: {'; '.join(host.settings)}")
            host.settings.clear()
        if self.asked.problems is None:
            self.problems = self._default_problems(op)
        left = [problem for problem in self.problems if str(problem) not in self.asked.done]
        self.finished = len(self.problems) - len(left)
        if not left:
            return
        try:
            self.rivals = rivals_of(op, self._opened["rivals"], self.asked.against, self.asked.every, self.bench.gpu)
            self._oracle = self._referee(op if built_in else spec)
            self._contract = op if built_in else spec
            able = [problem for problem in left if self._serves(problem)]
        except (ValueError, ContractFailed, Failed, Died) as error:
            raise Unusable(str(error)) from error
        if not able and not self.finished:
            raise Unusable(f"it can be asked for none of the problems here: {'; '.join(dict.fromkeys(self._unserved))}")
        self._paths: Launches = {}
        if self.bench.gpu is not None:  # a CPU launches no kernels
            self._paths = self._launched(able, self.bench.gpu)
        faults = self._sanitized(min(able, key=lambda one: one.flops())) if able and self.asked.sanitize else []
        for problem in left:
            if problem in able and faults:
                self.docket.refuse("correctness", "; ".join(faults), problem)
            elif problem in able:
                self._one(problem)
            self.docket.done(problem)
            self.finished += 1

    def _sanitized(self, problem: Problem) -> list[str]:
        """What compute-sanitizer has against one call on the problem, in words. No kernel gets a number anywhere that does
        what it may not do somewhere."""
        if self.bench.gpu is None:
            self.docket.note("compute-sanitizer was not run: there is no GPU here")
            return []
        looked = sanitize(self.asked.spec, problem, self.asked.seed, lambda text: self._step(text, problem))
        for note in remarks_on(looked):
            self.docket.note(note, problem)
        return [f"{one.fault} (in one call on {problem})" for one in looked if one.fault is not None]

    def _source_digest(self) -> str | None:
        """Of what is about to be loaded: a run that is gone on with must find it as it was."""
        return files_digest(candidates_beside(self.asked.spec, self.asked.against))

    def _spawn(self, module: str) -> Ward:
        ward = Ward(module, self.asked.watchdog_s)
        self._wards.append(ward)
        return ward

    def _fresh_host(self) -> Watched:
        """A new process with the candidate loaded. Raises Failed, Died or Tampered."""
        self._host = Watched(self._spawn(HOST))
        said = self._host.ask("open", spec=self.asked.spec, contract="")
        try:
            self._opened = introduced(said)
        except ValueError as error:
            raise Failed(str(error)) from error
        return self._host

    def _referee(self, contract: str) -> Oracle:
        answers: Answers = InProcess(Referee().commands) if contract in BUILT_IN else self._spawn(REFEREE)
        oracle = Oracle(answers)
        oracle.ask("open", contract=contract)
        return oracle

    def _default_problems(self, op: str) -> tuple[Problem, ...]:
        texts = self._opened["problems"]
        if not texts and op == ATTENTION:
            return suite("cpu" if self.bench.gpu is None else "quick")
        try:
            return tuple(dict.fromkeys(parse_problem(text) for text in texts))
        except ProblemError as error:
            raise Unusable(f"its contract's default problems: {error}") from error

    def _serves(self, problem: Problem) -> bool:
        """Whether the candidate can be asked for a problem; the reason is noted where it cannot."""
        reason = self._oracle.ask("problem", text=str(problem))["cannot"]
        if reason is None and self.bench.gpu is None and problem.flops() > MOST_CPU_FLOPS:
            reason = "too much for a CPU, and there is no GPU here"
        if reason is not None:
            self._unserved.append(str(reason))
            self.docket.note(reason, problem)
        return reason is None

    def _one(self, problem: Problem) -> None:
        """Everything on one problem; whatever goes wrong ends this problem only."""
        self._stage = "correctness"
        try:
            host = self._host if self._host is not None and self._host.ward.alive else self._fresh_host()
            self._measure(host, problem)
        except Tampered as error:
            self.docket.refuse("sanity", str(error), problem)
        except Untrue as error:
            self.docket.refuse(error.stage, str(error), problem)
        except Failed as error:
            self.docket.refuse(self._stage, f"it does not run: {error} ({self._doing})", problem)
        except (Died, ContractFailed) as error:
            self.docket.refuse(self._stage, f"{error} ({self._doing})", problem)
        else:
            return
        if self._host is not None:
            self._host.ward.close()  # whatever it left behind, a poisoned CUDA context or a thread, ends with it

    def _measure(self, host: Watched, problem: Problem) -> None:
        seen = (str(problem), "") in self._paths
        if seen and not self._path_row(problem, "", "", "candidate"):
            return
        told = self._oracle.ask("problem", text=str(problem))
        host.ask("problem", text=str(problem))
        if not self._correct(host, problem):
            host.ward.close()  # what it left running would disturb whoever comes next
            return
        if not seen and not self._path_row(problem, "", "", "candidate"):
            return  # it ran here, and not where its call path was looked at
        self._clean_problem(problem)
        rivals = [rival for rival in self.rivals if self._able(rival, problem)]
        self._stage = "timing"
        contest = Contest(
            bench=self.bench,
            problem=problem,
            ledger=self.ledger,
            name=self.asked.spec,
            host=host,
            clean=self._clean,
            oracle=self._oracle,
            quick=self.asked.quick,
            seed=self.asked.seed,
            input_bytes=int(told["input_bytes"]),
            step=lambda text: self._step(text, problem),
        )
        usage = Usage(host.ward, one_thread=self.bench.gpu is None)
        contest.go([(rival, rival.config(problem, self.bench.gpu)) for rival in rivals])
        self._settings_kept(host)
        too_much = usage.too_much()
        if too_much is not None:
            raise Untrue("timing", too_much)
        if contest.against_best is not None:
            broken = self.promises.speedup_missed(*contest.against_best)
            if broken is not None:
                self.docket.refuse("sanity", broken, problem, voids=False)

    def _correct(self, host: Watched, problem: Problem) -> bool:
        """The correctness battery on the candidate, its row, and its refusal where it fails."""
        battery = Battery(
            host,
            host.folder,
            self._oracle,
            self.asked.seed,
            self.bench.gpu is not None,
            lambda text: self._step(text, problem),
        )
        found = battery.examine(
            self._opened["distributions"], self._opened["variants"], self.asked.repeats, self.promises.deterministic
        )
        if host.settings:
            found.reasons.append(f"it leaves settings changed: {'; '.join(dict.fromkeys(host.settings))}")
            host.settings.clear()
        for note in found.notes:
            self.docket.note(note, problem)
        self.docket.correctness(problem, self.asked.spec, "", "candidate", found)
        if found.reasons:
            self.docket.refuse("correctness", "; ".join(found.reasons), problem)
        return not found.reasons

    def _settings_kept(self, host: Watched) -> None:
        if host.settings:
            raise Untrue("sanity", f"it left settings changed while it was timed: {'; '.join(dict.fromkeys(host.settings))}")

    def _able(self, rival: Rival, problem: Problem) -> bool:
        """Whether a rival serves the problem and is right, in a process without the candidate; if not, that is its affair."""
        reason = rival.cannot(problem, self.bench.gpu)
        if reason is not None:
            self.docket.note(reason, problem, rival.who)
            return False
        config = rival.config(problem, self.bench.gpu)
        self._step(f"checking {rival.who}", problem)
        try:
            battery = Battery(
                self._clean, self._clean.folder, self._oracle, self.asked.seed, self.bench.gpu is not None, lambda text: None
            )
            found = battery.glance(rival.who, config)
        except (Failed, Died) as error:
            self.docket.refuse_rival(rival.who, config, f"it does not run: {error}", problem)
            self._clean.close()  # a poisoned CUDA context ends with it
            self._clean_problem(problem)
            return False
        self.docket.correctness(problem, rival.who, config, rival.origin, found)
        if found.reasons:
            self.docket.refuse_rival(rival.who, config, "; ".join(found.reasons), problem)
            return False
        return self._path_row(problem, rival.who, config, rival.origin, rival.promised(problem, config, self.bench.gpu))

    def _clean_problem(self, problem: Problem) -> None:
        """Have the process without the candidate at this problem, in a new process where there is none (any more)."""
        self._clean = self._clean_room.get(self._contract)
        self._clean.ask("problem", text=str(problem))

    def _launched(self, problems: Sequence[Problem], gpu: Gpu) -> Launches:
        todo = []
        for problem in problems:
            able = [one for one in self.rivals if one.cannot(problem, gpu) is None]
            todo.append((problem, [("", ""), *((one.who, one.config(problem, gpu)) for one in able)]))
        try:
            return launched(
                self.asked.spec, todo, self.asked.seed, self.asked.watchdog_s, lambda problem: self._step("call path", problem)
            )
        except Blind as error:
            raise Unusable(str(error)) from error

    def _path_row(self, problem: Problem, who: str, config: str, origin: Origin, promised: Sequence[Launch] = ()) -> bool:
        """Record what a call launched and hold it to what was promised of it. Returns whether it may go on."""
        if self.bench.gpu is None:
            return True
        launches = self._paths.get((str(problem), who), [])
        broken = (
            broken_promises(promised, launches, origin if promised else "candidate") if who else self.promises.broken(launches)
        )
        if not launches:
            broken = ["no kernel was seen"]
        self.docket.callpath(problem, who or self.asked.spec, config, launches, broken)
        if not who:
            for note in remarks(launches):
                self.docket.note(note, problem)
            if broken:
                self.docket.refuse("callpath", "; ".join(broken), problem)
        return not broken

    def _step(self, text: str, problem: Problem | None = None) -> None:
        if self.asked.deadline is not None and time.monotonic() > self.asked.deadline:
            raise BudgetSpent
        self._doing = text
        self._tell(f"{self.asked.spec}{f' on {problem}' if problem is not None else ''}: {text}")

    def _refuse_all(self, stage: Stage, reason: str) -> None:
        for problem in self.problems or self._default_problems(ATTENTION):
            if str(problem) not in self.asked.done:
                self.docket.refuse(stage, reason, problem)
                self.docket.done(problem)
