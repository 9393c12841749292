"""A kernel compared with a rival: a timing row as seen from either kernel, with the reasons not to trust it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.judge.control import Control, is_control, measured, resolution_of
from flashmoe_science.judge.stats import Interval, time_interval
from flashmoe_science.judge.trust import Trust
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Cache, Clock, Origin, TimingRow


@dataclass(frozen=True, slots=True)
class Comparison:
    """A kernel and a rival, sampled in pairs on the same inputs.

    ``times`` and ``rival_times`` are the samples, ns a call, good to ``resolution`` ns; ``time_ns`` and ``rival_time_ns`` are
    their medians. ``measured`` is the ratio of the rival's time to the kernel's (above 1 the kernel is faster), None where the
    samples are no pairs; ``interval`` is ``measured`` widened by the bias of ``control``, which is the kernel's own where it
    has one. ``fault`` and ``rival_fault`` are why a kernel is not trusted here, ``shared_fault`` why the samples are not."""

    run: str
    gpu: str
    problem: str
    clock: Clock
    cache: Cache
    kernel: str
    config: str
    origin: Origin
    rival: str
    rival_config: str
    rival_origin: Origin
    times: Sequence[int]
    rival_times: Sequence[int]
    resolution: float
    measured: Interval | None
    control: Control
    rival_control: Control
    fault: str | None
    rival_fault: str | None
    shared_fault: str | None
    quick: bool

    @property
    def believed(self) -> bool:
        return self.measured is not None and not (self.fault or self.rival_fault or self.shared_fault)

    @property
    def interval(self) -> Interval:
        """The ratio with the widened interval; only for samples that are pairs, as in every believed comparison."""
        assert self.measured is not None
        return self.measured.widened(self.control.bias)

    @property
    def time_ns(self) -> float:
        return float(statistics.median(self.times))

    @property
    def rival_time_ns(self) -> float:
        return float(statistics.median(self.rival_times))

    @property
    def spread(self) -> float:
        """Interquartile range of the kernel's times over their median."""
        first, middle, third = statistics.quantiles(self.times, n=4, method="inclusive")
        return (third - first) / middle

    def time(self) -> Interval:
        """The kernel's own time in ns, with its interval. Raises ValueError for fewer than two samples."""
        return time_interval(self.times, self.resolution)

    def flipped(self) -> Comparison:
        """The same comparison from the rival's side."""
        swapped = {own: getattr(self, other) for pair in _SIDES for own, other in (pair, pair[::-1])}
        return dataclasses.replace(self, **swapped, measured=self.measured.flipped() if self.measured else None)


# Fields that both kernels have.
_SIDES = (
    ("kernel", "rival"), ("config", "rival_config"), ("origin", "rival_origin"), ("times", "rival_times"),
    ("control", "rival_control"), ("fault", "rival_fault"),
)  # fmt: skip
_SAME = ("problem", "clock", "cache", "kernel", "config", "origin", "rival", "rival_config", "rival_origin", "quick")


def comparisons(trust: Trust) -> list[Comparison]:
    """Every comparison of a run, from both sides: all rows, then all flipped."""
    rows = [_comparison(trust, row) for row in trust.run.of(TimingRow) if not is_control(row)]
    return [*rows, *(row.flipped() for row in rows)]


def _comparison(trust: Trust, row: TimingRow) -> Comparison:
    """A timing row with its ratio (where its samples are pairs) and the reasons not to trust it."""
    shared = trust.samples(row)
    if shared is None and len(row.a) < 2:
        shared = f"the number of pairs of samples is {len(row.a)}; an interval needs more"
    whole, problem = trust.whole_problem(row.problem), parse_problem(row.problem)
    control, rival_control = (trust.control(row.problem, row.clock, row.cache, kernel) for kernel in (row.kernel, row.rival))

    def fault(kernel: str, config: str, times: Sequence[int], own: Control) -> str | None:
        reason = whole or own.reason or trust.kernel(row.problem, kernel, config)
        return reason or (None if shared else trust.too_fast(problem, statistics.median(times), row.cache))

    return Comparison(
        run=trust.run.header.run,
        gpu=trust.gpu_name,
        times=row.a,
        rival_times=row.b,
        resolution=resolution_of(row),
        measured=None if shared else measured(row),
        control=control,
        rival_control=rival_control,
        fault=fault(row.kernel, row.config, row.a, control),
        rival_fault=fault(row.rival, row.rival_config, row.b, rival_control),
        shared_fault=shared,
        **{name: getattr(row, name) for name in _SAME},
    )
