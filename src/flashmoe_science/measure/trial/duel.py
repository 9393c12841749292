"""Pairs of samples taken in another process and counted in this one.

A candidate may say of its time what it likes; this process looks at its own clock as well. Every sample is one message there
and back, so what a child claims for it must fit into what passed here, and fill most of it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flashmoe_science.judge.stats import Interval, ratio_interval
from flashmoe_science.measure.timing import QUICK_SAMPLES, Sampling, paired
from flashmoe_science.measure.trial.warden import Child
from flashmoe_science.records import Clock

_PINGS = 7
_MOST_WALL = 1.5  # of the time claimed: a message takes a tenth of a millisecond, a sample 2 to 10
_LEAST_WALL = 0.98
SLOWED = 1.10  # of beside_over_alone: a rival that is slowed, beyond what chance explains
REMEMBERED = 1.25  # of new_over_met
_ROUNDS, _MOST_OF_SETS = 6, 8
_ALONE = Sampling(least=8, most=16, seconds=1.5)
_STEPS = 128  # scales are multiples of its inverse, which every dtype holds exactly
_scales: list[float] = []  # still to come


@dataclass(slots=True)
class Remote:
    """A player on a clock in a child, as a sampler here. ``claimed`` and ``walls``: ns a sample, by its clock and by ours."""

    child: Child
    clock: Clock
    slot: int
    calls: int
    claimed: list[float] = field(default_factory=list)
    walls: list[int] = field(default_factory=list)

    def sample(self) -> float:
        """Nanoseconds a call, as the child claims; what is no time at all counts as 0, and is refused as such."""
        said = self.child.ask("sample", slot=self.slot).get("ns")
        time = float(said) if isinstance(said, int | float) and math.isfinite(said) else 0.0
        self.claimed.append(time * self.calls)
        self.walls.append(self.child.last_wall_ns)
        return time

    def again(self) -> Remote:
        """The same player on the same clock, with nothing measured yet."""
        return replace(self, claimed=[], walls=[])

    def quick(self) -> float:
        """The median of a few samples of it alone."""
        return statistics.median(self.sample() for _ in range(QUICK_SAMPLES))

    def cut(self, path: str) -> tuple[int, bool]:
        """Have a sample cut at a random call and its output written to ``path``. Returns its input set, and whether it is plain
        tensors."""
        said = self.child.ask("sample", slot=self.slot, cut_at=random.random(), path=path)
        return int(said["set"]), bool(said["plain"])

    def shown(self, path: str) -> tuple[int, bool]:
        """Have a result of the sample that was timed last written to ``path``; the same is returned as by ``cut``."""
        said = self.child.ask("show", slot=self.slot, which=random.random(), path=path)
        return int(said["set"]), bool(said["plain"])

    def read(self) -> int:
        """Have the results that a sample kept read, and nothing handed over. Returns how many they were."""
        return int(self.child.ask("show", slot=self.slot, which=0.0, path="")["kept"])


def ping_ns(child: Child) -> float:
    """What a message there and back takes."""
    walls = []
    for _ in range(_PINGS):
        child.ask("ping")
        walls.append(child.last_wall_ns)
    return float(statistics.median(walls))


def disagreement(remote: Remote, ping: float) -> str | None:
    """Why the times that a child claims cannot be, by this process's clock; None if they can. The median sample decides: one
    that the machine held up is no evidence."""
    pairs = [(wall, max(claimed, 1.0)) for wall, claimed in zip(remote.walls, remote.claimed, strict=True)]
    fits = statistics.median(wall / claimed for wall, claimed in pairs) >= _LEAST_WALL
    fills = statistics.median((wall - ping) / claimed for wall, claimed in pairs) <= _MOST_WALL
    if fits and fills:
        return None
    claimed, wall = statistics.median(remote.claimed), statistics.median(remote.walls)
    return (
        f"its clock disagrees with the harness's: it says {claimed / 1e6:.3f} ms a sample, of which {wall / 1e6:.3f} ms passed"
    )


def random_scale() -> float:
    """A factor for the inputs of the next pair, from 1/2 to 3/2. None comes again before all have come: a candidate that
    remembers would know it."""
    if not _scales:
        every = range(_STEPS // 2, 3 * _STEPS // 2 + 1)
        _scales.extend(step / _STEPS for step in random.sample(every, len(every)))
    return _scales.pop()


def duel(a: Remote, b: Remote, sampling: Sampling, before_pair: Callable[[int], None]) -> tuple[list[int], list[int]]:
    """A B B A, as ``timing.paired``; ``before_pair(index)`` is called ahead of each pair."""
    taken = 0

    def sampled(one: Remote) -> Callable[[], float]:
        def sample() -> float:
            nonlocal taken
            if taken % 2 == 0:
                before_pair(taken // 2)
            taken += 1
            return one.sample()

        return sample

    return paired(sampled(a), sampled(b), sampling)


def new_over_met(own: Remote, sets: int) -> Interval | None:
    """A candidate's time on values that it has not met, over its time on values met before: above 1 for one that keeps answers.

    The input sets are gone through after their values changed, and once more. None where that takes many samples (all that such
    a candidate is timed on is new to it), and where a time is none, which is refused elsewhere.
    """
    samples = -(-sets // own.calls)
    if samples > _MOST_OF_SETS:
        return None
    new_ns: list[int] = []
    met_ns: list[int] = []
    for _ in range(_ROUNDS):
        own.child.ask("refresh", scale=random_scale())
        for times in (new_ns, met_ns):
            times.append(round(sum(own.sample() for _ in range(samples)) / samples))
    return None if min(*new_ns, *met_ns) <= 0 else ratio_interval(met_ns, new_ns)


def beside_over_alone(beside: Remote, alone: Remote) -> Interval | None:
    """A rival's time in the candidate's process over its time in one without it. None where a time is none."""

    def refresh(_: int) -> None:
        scale = random_scale()
        beside.child.ask("refresh", scale=scale)
        alone.child.ask("refresh", scale=scale)

    alone_ns, beside_ns = duel(alone, beside, _ALONE, refresh)
    return None if min(*alone_ns, *beside_ns) <= 0 else ratio_interval(alone_ns, beside_ns)
