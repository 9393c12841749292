"""Samplers of kernels that live behind a channel.

A function in a child may say of its time what it likes; this process looks at its own clock as well. Every sample is one
message there and back, so what a child claims for it must fit into what passed here, and fill most of it.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from flashmoe_science.measure.channel import Channel
from flashmoe_science.measure.clocks import QUICK_SAMPLES
from flashmoe_science.records import Clock

_STEPS = 128  # scales are multiples of its inverse, which every dtype holds exactly
_scales: list[float] = []  # still to come


@dataclass(slots=True)
class RemoteSampler:
    """A kernel on a clock, behind a channel, as a sampler here. ``claimed`` and ``walls`` are ns a sample by its clock and by
    this process's."""

    channel: Channel
    clock: Clock
    slot: int
    calls: int
    claimed: list[float] = field(default_factory=list)
    walls: list[int] = field(default_factory=list)

    def sample(self) -> float:
        """Nanoseconds a call, as the child claims; what is no time at all counts as 0, and is refused as such."""
        claimed = self.channel.ask("sample", slot=self.slot).get("ns")
        time = float(claimed) if isinstance(claimed, int | float) and math.isfinite(claimed) else 0.0
        self.claimed.append(time * self.calls)
        self.walls.append(self.channel.last_wall_ns)
        return time

    def again(self) -> RemoteSampler:
        """The same kernel on the same clock, with nothing measured yet."""
        return replace(self, claimed=[], walls=[])

    def quick(self) -> float:
        """The median of a few samples of it alone."""
        return statistics.median(self.sample() for _ in range(QUICK_SAMPLES))

    def cut(self, path: str) -> dict[str, Any]:
        """Have a sample cut at a random call and its output handed over under ``path``; the answer says of which input set."""
        return self.channel.ask("sample", slot=self.slot, cut_at=random.random(), path=path)

    def shown(self, path: str) -> dict[str, Any]:
        """The same of a result of the sample that was timed last."""
        return self.channel.ask("show", slot=self.slot, which=random.random(), path=path)

    def read(self) -> int:
        """Have the results that a sample kept read, and nothing handed over. Returns how many they were."""
        return int(self.channel.ask("show", slot=self.slot, which=0.0, path="")["kept"])


def random_scale() -> float:
    """A factor for the inputs of the next pair, from 1/2 to 3/2. None comes again before all have come: a candidate that
    remembers would know it."""
    if not _scales:
        every = range(_STEPS // 2, 3 * _STEPS // 2 + 1)
        _scales.extend(step / _STEPS for step in random.sample(every, len(every)))
    return _scales.pop()
