"""Kernels of the package and their peers on one problem, all behind one channel: call path, correctness, then the clocks.

Subjects are what the run is about; rivals are what they are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_science.contract import built_in
from flashmoe_science.kernel import Config, Device
from flashmoe_science.measure.channel import Failed
from flashmoe_science.measure.compare import Comparer, Timed, Untrue
from flashmoe_science.measure.finding import Finding, Promised
from flashmoe_science.measure.on_problem import OnProblem
from flashmoe_science.measure.request import Entry, Implementation, Request
from flashmoe_science.measure.sandbox.settings import Settings
from flashmoe_science.problem import Problem


def configs_of(one: Implementation, problem: Problem, device: Device, request: Request) -> tuple[str, ...]:
    """The configs that a run tries of an implementation on a problem, the automatic choice's among them."""
    if one.origin != "ours":
        return one.configs(problem, device, request.configs)
    chosen = one.chosen_config(problem, device)
    others = () if request.as_dispatched else one.configs(problem, device, request.configs)
    return tuple(dict.fromkeys((chosen, *others)))[: request.configs]


class ProblemRun:
    """One problem; the worker is at it."""

    def __init__(self, on: OnProblem) -> None:
        self.on, self.session, self.bench, self.problem = on, on.session, on.session.bench, on.problem
        self.request = on.session.request
        self.contract, self.comparer, self.settings = built_in(on.problem.op), Comparer(on), Settings()

    def go(self, subjects: Sequence[Implementation], rivals: Sequence[Implementation]) -> None:
        """Measure. Raises BudgetSpent between two steps when the deadline has passed."""
        ours, theirs = self._fastest(subjects), self._fastest(rivals)
        ours = [one for one in ours if self._passes(one.entry)]
        if ours:
            self._timed(ours, theirs)

    def _fastest(self, implementations: Sequence[Implementation]) -> list[Timed]:
        """The fastest config of each implementation that is right and launches what it promised, the fastest one first."""
        entries = [entry for one in implementations for entry in self._entries(one)]
        right = [entry for entry in entries if self._runs(entry)]
        timed = self.comparer.ranked(right, "eager" if self.bench.gpu is None else "graph")
        if timed:
            text = ", ".join(f"{one.entry}: {one.quick_ns:.0f} ns" for one in timed)
            self.session.note(f"quick bench ({timed[0].sampler.clock}): {text}", self.problem)
        best: dict[str, Timed] = {}
        for one in timed:
            best.setdefault(one.entry.name, one)
        return list(best.values())

    def _entries(self, one: Implementation) -> list[Entry]:
        reason = one.cannot(self.problem, self.bench.gpu)
        if reason is not None:
            self.session.note(reason, self.problem, one.name)
            return []
        return [Entry(one, config) for config in configs_of(one, self.problem, self.bench.gpu, self.request)]

    def _runs(self, entry: Entry) -> bool:
        """Whether one call of the entry is right and launched what was promised."""
        self.on.step(f"checking {entry}")
        try:
            found = self.on.exam(entry).glance()
        except Failed as error:
            if error.cannot_serve is not None:
                self.session.note(error.cannot_serve, self.problem, entry.name)
            else:
                self.on.refuse("callpath", [f"it does not run: {error}"], entry)
            return False
        self._hold_to_settings(entry, found)
        if not self.on.keeps_its_promise(entry):
            return False
        if entry.implementation.origin == "ours" and not found.reasons:
            return True  # it has its row from the whole exam
        return self.on.examined(entry, found)

    def _hold_to_settings(self, entry: Entry, found: Finding) -> None:
        """Put back the settings that calls of the entry left changed; a fault, but of a peer only noted."""
        left = self.settings.left()
        if left and entry.implementation.origin == "peer":
            self.session.note(f"it leaves settings changed, which are set back: {'; '.join(left)}", self.problem, entry.name)
        else:
            found.left_behind(left, ())

    def _passes(self, entry: Entry) -> bool:
        """The whole exam of a subject with its fastest config, as a user's function sits it. Of a peer one call is enough."""
        if entry.implementation.origin == "peer":
            return True
        exam, found = self.on.exam(entry), Finding()
        try:
            workspace = entry.implementation.workspace(self.problem, entry.config)
            promised = Promised(deterministic=True, workspace=workspace)
            found = exam.whole(self.contract.distributions, self.contract.variants, promised)
            if not found.reasons:
                found.reasons += exam.as_called()
        except Failed as error:
            found.fault("does-not-run", f"it does not run: {error}")
        self._hold_to_settings(entry, found)
        return self.on.examined(entry, found)

    def _timed(self, subjects: Sequence[Timed], rivals: Sequence[Timed]) -> None:
        """The pairs on every clock. A subject that is caught in a timed sample has no number on the problem."""
        mine, theirs = [one.entry for one in subjects], [one.entry for one in rivals]
        try:
            self.comparer.against(subjects, rivals)
            if self.bench.gpu is not None:
                kernel = mine[0].implementation.kernel
                config = Config.parse(mine[0].config)
                if (
                    kernel
                    and kernel.origin == "ours"
                    and not self.contract.user_call(kernel, config, self.problem, self.bench.gpu)
                ):
                    text = "is called as planned; the public function would not choose this config here"
                    self.session.note(f"eager clock: {mine[0]} {text}", self.problem, mine[0].name)
                self.comparer.eagerly(mine[0], theirs)
        except Untrue as error:
            self.session.refuse(error.stage, str(error), self.problem, mine[0], voids=True)
        except Failed as error:
            self.on.refuse("timing", [f"it does not run: {error}"], mine[0])
