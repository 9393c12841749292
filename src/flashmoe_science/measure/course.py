"""How the time of a run is spread over its parts, so that what is left of it can be told before it is over.

The seconds are what the parts took on an H200 (342 candidates and 315 pairs on 29 problems in 144 s). Only their proportions
matter: whoever shows the time left takes the run's own pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.kernel import Device
from flashmoe_science.measure.prebuild import batches
from flashmoe_science.measure.round import Plan
from flashmoe_science.problem import Problem

_BUILDING_S, _BUILD_S = 6.0, 0.06  # to start the processes; a build among fourteen of them
_PATHS_S, _PATH_S = 6.0, 0.08  # to start the process; a candidate in it
_CANDIDATE_S = 0.12  # built, held to the oracle and put on a clock
_PAIR_S = 0.25  # a control or a rival, put on its clock and sampled


@dataclass(frozen=True, slots=True)
class Course:
    """Expected seconds of the parts, in the order in which they come; ``paths`` and ``rounds`` hold one for each problem.

    ``steps`` are how many steps a problem's round is expected to tell of.
    """

    building: float
    paths: tuple[float, ...]
    rounds: tuple[float, ...]
    steps: tuple[int, ...]

    def at_building(self, done: int, builds: int) -> float:
        """The share of the run that is over, from 0 to 1, when so many builds are done."""
        return self._share(self.building * done / builds if builds else 0.0)

    def at_path(self, index: int) -> float:
        """... when the call paths of the problem ``index`` begin."""
        return self._share(self.building + sum(self.paths[:index]))

    def at_round(self, index: int, step: int) -> float:
        """... at the step ``step`` of the problem ``index``'s round, of which no more is believed than that it goes on."""
        before = self.building + sum(self.paths) + sum(self.rounds[:index])
        within = self.rounds[index] * min(0.95, step / self.steps[index]) if index < len(self.rounds) else 0.0
        return self._share(before + within)

    def _share(self, seconds: float) -> float:
        whole = self.building + sum(self.paths) + sum(self.rounds)
        return seconds / whole if whole else 1.0


def course(problems: Sequence[Problem], plan: Plan, device: Device) -> Course:
    """What is expected of a run. On a CPU nothing is built beforehand and no call path is looked at."""
    from flashmoe_science.measure.paths import Todo

    todo = [Todo(problem, plan.candidates(problem, device)) for problem in problems]
    builds = sum(map(len, batches(todo))) if device is not None else 0
    rounds, steps = [], []
    for one in todo:
        names = {candidate.name for candidate in one.candidates}
        subjects = sum(kernel.name in names for kernel in plan.subjects)
        on_a_clock = 1 + len(names) - subjects + 2 * max(0, subjects - 1)
        pairs = on_a_clock + (3 if device is not None else 0) + (on_a_clock if plan.warm and device is not None else 0)
        rounds.append(_CANDIDATE_S * len(one.candidates) + _PAIR_S * pairs)
        steps.append(3 * len(one.candidates) + 2 * pairs + 1)
    return Course(
        building=_BUILDING_S + _BUILD_S * builds if builds else 0.0,
        paths=tuple((_PATHS_S if not i else 0.0) + _PATH_S * len(one.candidates) for i, one in enumerate(todo))
        if device is not None
        else (),
        rounds=tuple(rounds),
        steps=tuple(steps),
    )
