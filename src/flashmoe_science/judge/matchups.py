"""Every pair of kernels that a run sampled side by side, where both and the samples are believed: what verdicts choose from.

A verdict says how a kernel stands to its best rival. A claim on two kernels by name, a comparison and the ratchet ask for
pairs that no verdict speaks of; they find them here, with the same doubts: the oracle, the call path, the samples, the control.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.judge.pairs import pair_of
from flashmoe_science.judge.stats import Interval
from flashmoe_science.judge.trust import Trust, is_control
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Cache, Clock, Origin, TimingRow
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Matchup:
    """One kernel beside a rival on the same inputs. ``interval`` is of the rival's time over the kernel's (above 1 the kernel
    is faster), widened by what the control leaves open. Times are medians, ns a call."""

    run: str
    started: str
    suite: str
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
    time_ns: float
    rival_time_ns: float
    interval: Interval
    quick: bool


def matchups(run: Run) -> list[Matchup]:
    """The believed pairs of a run, each as both of its kernels see it."""
    trust = Trust(run)
    found: list[Matchup] = []
    for row in run.rows:
        if not isinstance(row, TimingRow) or is_control(row):
            continue
        control = trust.control(row.problem, row.clock, row.cache)
        if trust.whole_problem(row.problem) or control.reason:
            continue
        pair = pair_of(trust, parse_problem(row.problem), row)
        if not pair.believed:
            continue
        for side in (pair, pair.flipped()):
            assert side.interval is not None  # a believed pair has one
            found.append(
                Matchup(
                    run=run.header.run,
                    started=run.header.started,
                    suite=run.header.suite,
                    gpu=trust.gpu_name,
                    problem=row.problem,
                    clock=row.clock,
                    cache=row.cache,
                    kernel=side.kernel,
                    config=side.config,
                    origin=side.origin,
                    rival=side.rival,
                    rival_config=side.rival_config,
                    rival_origin=side.rival_origin,
                    time_ns=side.time_ns,
                    rival_time_ns=side.rival_time_ns,
                    interval=side.interval.widened(control.bias),
                    quick=side.quick,
                )
            )
    return found
