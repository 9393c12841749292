"""Everything that is measured of one problem: call path, correctness, then the clocks.

An entry that fails a stage is refused there, with the reason on record, and takes no part in the later ones. Subjects are what
the run is about; rivals are what they are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmoe_science.contract import Contract
from flashmoe_science.kernel import Config, Device
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.channel import Asked, Channel, Failed
from flashmoe_science.measure.compare import Clocked, Comparer, Timed, Untrue, input_sets
from flashmoe_science.measure.correctness import Exam, Finding, Promised
from flashmoe_science.measure.implementation import Entry, Implementation
from flashmoe_science.measure.launches.look import Launches
from flashmoe_science.measure.launches.promised import broken_launches
from flashmoe_science.measure.recorder import Recorder
from flashmoe_science.measure.sandbox.settings import Settings
from flashmoe_science.problem import Problem

REPEATS, REPEATS_QUICK = 10, 3  # calls that are compared bit by bit
_MORE_REPEATS_S = 0.1  # for as long as this, more of them


class BudgetSpent(Exception):
    """The time given to the run is over; what was measured stands."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly a run measures. ``deadline`` is on time.monotonic's clock."""

    seed: int
    quick: bool = False
    configs: int = 4
    warm: bool = False
    as_dispatched: bool = False  # of ours only what the automatic choice runs: drawn problems show what a user gets
    deadline: float | None = None

    @property
    def repeats(self) -> int:
        return REPEATS_QUICK if self.quick else REPEATS


def configs_of(one: Implementation, problem: Problem, device: Device, effort: Effort) -> tuple[str, ...]:
    """The configs that a run tries of an implementation on a problem, the automatic choice's among them."""
    if one.origin != "ours":
        return one.configs(problem, device, effort.configs)
    chosen = one.chosen_config(problem, device)
    others = () if effort.as_dispatched else one.configs(problem, device, effort.configs)
    return tuple(dict.fromkeys((chosen, *others)))[: effort.configs]


class ProblemRun:
    """One problem, kernels of the package and their peers, all behind one channel of this process."""

    def __init__(
        self,
        bench: Bench,
        problem: Problem,
        contract: Contract,
        worker: Channel,
        oracle: Asked,
        launches: Launches,
        framework: str | None,
        effort: Effort,
        recorder: Recorder,
        tell: Callable[[str], None],
    ) -> None:
        self.bench, self.problem, self.contract, self.worker, self.oracle = bench, problem, contract, worker, oracle
        self.launches, self.framework, self.effort = launches, framework, effort
        self.recorder, self.tell = recorder, tell

    def go(self, subjects: Sequence[Implementation], rivals: Sequence[Implementation]) -> None:
        """Measure. Raises BudgetSpent between two steps when the deadline has passed."""
        text = str(self.problem)
        input_bytes = int(self.oracle.ask("problem", text=text, by_function=False)["input_bytes"])
        self.worker.ask("problem", text=text)
        self.settings = Settings()
        comparer = self._comparer(input_bytes)
        ours, theirs = self._fastest(subjects, comparer), self._fastest(rivals, comparer)
        ours = [one for one in ours if self._passes(one.entry)]
        if ours:
            self._timed(comparer, ours, theirs)

    def _step(self, text: str) -> None:
        if self.effort.deadline is not None and time.monotonic() > self.effort.deadline:
            raise BudgetSpent
        self.tell(text)

    def _comparer(self, input_bytes: int) -> Comparer:
        sets, cache = input_sets(self.bench.gpu, input_bytes)
        return Comparer(
            Clocked(
                bench=self.bench,
                problem=self.problem,
                recorder=self.recorder,
                worker=self.worker,
                rivals_alone=self.worker,
                oracle=self.oracle,
                quick=self.effort.quick,
                seed=self.effort.seed,
                sets=sets,
                cache=cache,
                framework=self.framework,
                step=self._step,
            )
        )

    def _fastest(self, implementations: Sequence[Implementation], comparer: Comparer) -> list[Timed]:
        """The fastest config of each implementation that is right and launches what it promised, the fastest one first."""
        entries = [entry for one in implementations for entry in self._entries(one)]
        right = [entry for entry in entries if self._runs(entry)]
        timed = comparer.ranked(right, "eager" if self.bench.gpu is None else "graph")
        if timed:
            text = ", ".join(f"{one.entry}: {one.quick_ns:.0f} ns" for one in timed)
            self.recorder.note(f"quick bench ({timed[0].sampler.clock}): {text}", self.problem)
        best: dict[str, Timed] = {}
        for one in timed:
            best.setdefault(one.entry.name, one)
        return list(best.values())

    def _entries(self, one: Implementation) -> list[Entry]:
        reason = one.cannot(self.problem, self.bench.gpu)
        if reason is not None:
            self.recorder.note(reason, self.problem, one.name)
            return []
        return [Entry(one, config) for config in configs_of(one, self.problem, self.bench.gpu, self.effort)]

    def _runs(self, entry: Entry) -> bool:
        """Whether one call of the entry is right and launched what was promised."""
        self._step(f"checking {entry}")
        try:
            found = self._exam(entry).glance()
        except Failed as error:
            if error.cannot_serve is not None:
                self.recorder.note(error.cannot_serve, self.problem, entry.name)
            else:
                self.recorder.refuse("callpath", f"it does not run: {error}", self.problem, entry)
            return False
        self._hold_to_settings(entry, found)
        if self.bench.gpu is not None and not self._keeps_its_promise(entry):
            return False
        if found.reasons or entry.implementation.origin != "ours":  # ours has its row from the whole exam
            self.recorder.correctness(self.problem, entry, found)
        if found.reasons:
            self.recorder.refuse("correctness", "; ".join(found.reasons), self.problem, entry, codes=found.codes)
        return not found.reasons

    def _hold_to_settings(self, entry: Entry, found: Finding) -> None:
        """Put back the settings that calls of the entry left changed; a fault, but of a peer only noted."""
        left = self.settings.left()
        if left and entry.implementation.origin == "peer":
            self.recorder.note(f"it leaves settings changed, which are set back: {'; '.join(left)}", self.problem, entry.name)
        else:
            found.left_behind(left, ())

    def _keeps_its_promise(self, entry: Entry) -> bool:
        """Record what the entry's call launched, and hold it to what was promised."""
        seen = self.launches.get((str(self.problem), entry.who, entry.config))
        if seen is None:
            broken = ["its call path was not seen: the process that looked at it ended"]
        else:
            promised = entry.implementation.promised(self.problem, entry.config, self.bench.gpu)
            broken = broken_launches(promised, seen, entry.implementation.origin, self.contract.families)
        self.recorder.callpath(self.problem, entry, seen[0] if seen else [], broken)
        if broken:
            self.recorder.refuse("callpath", "; ".join(broken), self.problem, entry)
        return not broken

    def _exam(self, entry: Entry) -> Exam:
        return Exam(
            self.worker,
            self.oracle,
            entry.who,
            entry.config,
            self.effort.seed,
            self.bench.gpu is not None,
            self._step,
            self.effort.repeats,
            _MORE_REPEATS_S,
        )

    def _passes(self, entry: Entry) -> bool:
        """The whole exam of a subject with its fastest config, as a user's function sits it. Of a peer one call is enough."""
        if entry.implementation.origin == "peer":
            return True
        exam, found = self._exam(entry), Finding()
        try:
            workspace = entry.implementation.workspace(self.problem, entry.config)
            promised = Promised(deterministic=True, workspace=workspace)
            found = exam.whole(self.contract.distributions, self.contract.variants, promised)
            if not found.reasons:
                found.reasons += exam.as_called()
        except Failed as error:
            found.fault("does-not-run", f"it does not run: {error}")
        self._hold_to_settings(entry, found)
        for note in found.notes:
            self.recorder.note(note, self.problem, entry.name)
        self.recorder.correctness(self.problem, entry, found)
        if found.reasons:
            self.recorder.refuse("correctness", "; ".join(found.reasons), self.problem, entry, codes=found.codes)
        return not found.reasons

    def _timed(self, comparer: Comparer, subjects: Sequence[Timed], rivals: Sequence[Timed]) -> None:
        """The pairs on every clock. A subject that is caught in a timed sample has no number on the problem."""
        mine, theirs = [one.entry for one in subjects], [one.entry for one in rivals]
        try:
            comparer.against(subjects, rivals)
            if self.bench.gpu is not None:
                self._say_what_is_called(mine[0])
                comparer.eagerly(mine[0], theirs)
                if self.effort.warm and comparer.cache == "cold":
                    comparer.warmly(mine, theirs)
        except Untrue as error:
            self.recorder.refuse(error.stage, str(error), self.problem, mine[0], voids=True)
        except Failed as error:
            self.recorder.refuse("timing", f"it does not run: {error}", self.problem, mine[0])

    def _say_what_is_called(self, entry: Entry) -> None:
        kernel = entry.implementation.kernel
        if kernel is None or kernel.origin != "ours":
            return
        if self.contract.user_call(kernel, Config.parse(entry.config), self.problem, self.bench.gpu) is None:
            text = f"eager clock: {entry} is called as planned; the public function would not choose this config here"
            self.recorder.note(text, self.problem, entry.name)
