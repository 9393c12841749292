"""What a verdict is: one kernel, one problem, the conditions, and what the records say of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoe_science.judge.stats import Interval
from flashmoe_science.records import Cache, Clock, Origin

Said = Literal["faster", "slower", "equivalent", "undecided", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run's records say of one kernel under one set of conditions.

    ``ratio`` is the rival's time over the kernel's (above 1: the kernel is faster), with its 95% interval ``low`` to ``high``.
    A refused verdict holds no number at all. Times are median nanoseconds a call; ``tflops`` is 1e12 FLOP/s and ``gbps``
    1e9 bytes/s of the traffic that cannot be avoided; ``spread`` is the interquartile range of the times over their median;
    ``queries_per_second`` counts batch times queries, each once and not once a head. ``detectable`` is the relative difference
    that the samples could show. ``unmet`` are peers that could have been the rival and have no number; ``reason`` names them.
    ``control_low`` and ``control_high`` are the interval of the kernel-against-itself control.
    """

    problem: str
    op: str
    gpu: str
    suite: str
    kernel: str
    config: str
    origin: Origin | None
    clock: Clock
    cache: Cache
    run: str
    started: str
    commit: str | None
    verdict: Said = "undecided"
    reason: str | None = None
    rival: str | None = None
    rival_config: str | None = None
    rival_origin: Origin | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    time_ns: float | None = None
    rival_time_ns: float | None = None
    spread: float | None = None
    queries_per_second: float | None = None
    pairs: int = 0
    outliers: int = 0
    detectable: float | None = None
    control_low: float | None = None
    control_high: float | None = None
    peak_extra_bytes: int | None = None
    output_bytes: int | None = None
    quick: bool = False
    unmet: tuple[str, ...] = ()
    interval: Interval | None = field(default=None, repr=False, compare=False)

    @property
    def brought(self) -> bool:
        """Whether a user brought the kernel."""
        return is_brought(self.kernel, self.origin)

    @property
    def of_ours(self) -> bool:
        """Whether it says how good one of our kernels is. Beside a user's kernel it is but a rival."""
        return self.origin == "ours" and self.rival_origin != "candidate"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON or CSV; the interval's resamples are left out, and what the reason says in words."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("interval", "unmet")}


def is_brought(kernel: str, origin: Origin | None) -> bool:
    """Whether a user brought a kernel. Where no row says whence it is (it was refused before any was written), its name does:
    those of users are module:function."""
    return origin == "candidate" or (origin is None and ":" in kernel)
