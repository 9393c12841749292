"""What a run's records say of one kernel on one problem, GPU, clock and cache. Pure: the same records, the same verdicts.

Kernels are compared only where they were sampled in pairs, so never across runs, shapes, GPUs or clocks. For each of our
kernels the rival is the best peer: the one with the least time beside it. For each peer the rival is our best kernel, or the
best other peer in a run without ours. For a user's kernel it is the best of all others. Which run's verdicts count
is said in ``standing``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.formats import microseconds
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.stats import MIN_PAIRS, Interval, call
from flashmoe_science.judge.trust import Trust
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Cache, Clock, Origin

Conditions = tuple[str, Clock, Cache]  # problem, clock, cache
Said = Literal["faster", "slower", "equivalent", "undecided", "refused"]

_UNPAIRED_LEAD = 0.98  # a peer that was not paired with a kernel is taken to beat its rival only when clearly ahead
_OWN_TIME_SPREAD = 1.25  # a kernel's own median beside one rival over that beside another, from which it is remarked upon


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run's records say of one kernel under one set of conditions.

    ``ratio`` is the rival's time over the kernel's (above 1: the kernel is faster), with its 95% interval ``low`` to ``high``.
    A refused verdict holds no number at all. Times are median nanoseconds a call; ``tflops`` is 1e12 FLOP/s and ``gbps``
    1e9 bytes/s of the traffic that cannot be avoided; ``spread`` is the interquartile range of the times over their median;
    ``queries_per_second`` counts batch times queries. ``detectable`` is the relative difference that the samples could show.
    ``unmet`` are peers that could have been the rival and have no number. ``control_low`` and ``control_high`` are of the
    kernel-against-itself control. ``promise`` is "broken" where the kernel promised more speed than it reached;
    ``time_range_ns`` is the least and most of its own medians where those differ by its rival. ``remarks`` say both in words.
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
    unfinished: bool = False
    unmet: tuple[str, ...] = ()
    promise: Literal["broken"] | None = None
    time_range_ns: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()
    interval: Interval | None = field(default=None, repr=False, compare=False)

    @property
    def brought(self) -> bool:
        """Whether the kernel is a user's."""
        return is_brought(self.kernel, self.origin)

    @property
    def of_ours(self) -> bool:
        """Whether it says how good one of our kernels is. Beside a user's kernel it is but a rival."""
        return self.origin == "ours" and self.rival_origin != "candidate"

    @property
    def label(self) -> str:
        """The verdict as it is shown: "slower", or "slower, promise broken"."""
        return f"{self.verdict}, promise {self.promise}" if self.promise else self.verdict

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON or CSV, without the interval's resamples and what the reason says in words. What is remarked on
        is there only where there is something to remark."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("interval", "unmet")}
        return {name: value for name, value in values.items() if value or name not in _REMARKED}


_REMARKED = ("unfinished", "promise", "time_range_ns", "remarks")


def is_brought(kernel: str, origin: Origin | None) -> bool:
    """Whether a kernel is a user's. Where no row gives its origin (it was refused before any was written), its name does:
    those of users are module:function."""
    return origin == "candidate" or (origin is None and ":" in kernel)


def verdicts_of(trust: Trust, pairs: Iterable[Comparison]) -> list[Verdict]:
    """Every verdict of a run, by its comparisons, in the order of its problems. Raises ProblemError: one does not parse."""
    groups: dict[Conditions, list[Comparison]] = grouped(pairs, lambda pair: (pair.problem, pair.clock, pair.cache))
    said = [row for conditions, members in groups.items() for row in _Group(trust, conditions, members).verdicts()]
    said += _never_timed(trust, groups, said)
    return [row for rows in grouped(said, lambda row: row.problem).values() for row in rows]


class _Group:
    """The comparisons of one run under one set of conditions."""

    def __init__(self, trust: Trust, conditions: Conditions, pairs: Sequence[Comparison]) -> None:
        self.trust, self.conditions, self.pairs = trust, conditions, pairs
        self.problem = parse_problem(conditions[0])
        self.origins = {kernel: own[0].origin for kernel, own in grouped(pairs, lambda pair: pair.kernel).items()}
        # Kernel -> the believed comparison of its best config, with any rival.
        believed = grouped((pair for pair in pairs if pair.believed), lambda pair: pair.kernel)
        self.best = {kernel: min(own, key=_time_order) for kernel, own in believed.items()}

    def verdicts(self) -> list[Verdict]:
        ours, peers, brought = (
            [name for name, origin in self.origins.items() if origin == wanted] for wanted in ("ours", "peer", "candidate")
        )
        fastest_first = sorted((self.best[kernel] for kernel in ours if kernel in self.best), key=_time_order)
        rows = [self._verdict(kernel, peers if not brought or self._beside(kernel, peers) else brought) for kernel in ours]
        for kernel in brought:  # of the other candidates, those that were named as its rivals
            named = [pair.rival for pair in self._beside(kernel, brought) if pair.rival != kernel]
            rows.append(self._verdict(kernel, [*peers, *ours, *named]))
        for peer in peers:
            beside = [one.kernel for one in fastest_first if self._beside(peer, [one.kernel])]
            rows.append(self._verdict(peer, beside[:1] or brought or [other for other in peers if other != peer]))
        return rows

    def _beside(self, kernel: str, rivals: Iterable[str]) -> list[Comparison]:
        """Believed pairs of the kernel's best config with these rivals, full samples before quick ones, best rival first."""
        if kernel not in self.best:
            return []
        wanted, config = set(rivals), self.best[kernel].config
        found = [p for p in self.pairs if p.believed and p.kernel == kernel and p.config == config and p.rival in wanted]
        return sorted(found, key=lambda pair: (pair.quick, pair.interval.ratio))

    def _verdict(self, kernel: str, rivals: Sequence[str]) -> Verdict:
        def row(verdict: Said, reason: str | None, **values: Any) -> Verdict:
            return _verdict(self.trust, self.conditions, kernel, self.origins[kernel], verdict, reason, **values)

        if fault := self._fault(kernel):
            return row("refused", fault)
        beside = self._beside(kernel, rivals)
        if not beside:
            times = self._times(self.best[kernel]) if kernel in self.best else {}
            return row("undecided", "no rival that can be believed was timed beside it", **times)
        pair = beside[0]
        least, paired = _UNPAIRED_LEAD * pair.rival_time_ns, {one.rival for one in beside}
        ahead = [name for name in rivals if name in self.best and name not in paired and self.best[name].time_ns < least]
        if ahead:
            return row("undecided", f"{ahead[0]}, the best of the rivals, was not timed beside it", **self._times(pair))
        said, reasons = _call(pair)
        # Peers that could have been the best, had they a number; the eager clock is kept for the few that users call.
        able = self.trust.able_peers(self.conditions[0]) if pair.origin == "ours" and self.conditions[1] == "graph" else []
        unmet = tuple(peer for peer in able if peer not in self.best)
        if unmet:
            reasons.append(f"no number of {', '.join(unmet)} to compare with")
        ratio = {name: getattr(pair, name) for name in ("rival", "rival_config", "rival_origin", "rival_time_ns", "interval")}
        ratio |= {name: getattr(pair.interval, name) for name in ("ratio", "low", "high", "pairs", "outliers", "detectable")}
        return row(said, "; ".join(reasons) or None, unmet=unmet, **self._times(pair), **ratio)

    def _fault(self, kernel: str) -> str | None:
        """Why none of this kernel's pairs is believed, where that is of its own making or of the samples'."""
        pairs = [pair for pair in self.pairs if pair.kernel == kernel]
        config = self.best[kernel].config if kernel in self.best else None
        impossible = [pair.fault for pair in pairs if pair.config == config and pair.fault]
        if impossible:  # beside one rival it took a time that it cannot take: what it took beside others is no better
            return impossible[0]
        faults = [pair.fault or pair.shared_fault for pair in pairs]
        return None if None in faults else faults[0]

    def _times(self, pair: Comparison) -> dict[str, Any]:
        """A kernel's own time, speed and memory, as one of its comparisons has them, and what a reader should know of them: a
        promise that was not kept, a dependence on the rival."""
        extra, output = self.trust.memory(pair.problem, pair.kernel, pair.config)
        control, queries = pair.control.interval, self.problem.queries()
        broken, ranges = self.trust.promises.get((pair.problem, pair.kernel)), self._own_times(pair)
        words = [f"promise broken: {broken}"] if broken else []
        if ranges:
            low, high = map(microseconds, ranges)
            words.append(f"its own time ranged from {low} to {high} us beside different rivals")
        return {
            "config": pair.config,
            "time_ns": pair.time_ns,
            "tflops": self.problem.flops() / pair.time_ns / 1e3,
            "gbps": self.problem.min_bytes() / pair.time_ns,
            "spread": pair.spread,
            "queries_per_second": None if queries is None else queries / pair.time_ns * 1e9,
            "control_low": control and control.low,
            "control_high": control and control.high,
            "peak_extra_bytes": extra,
            "output_bytes": output,
            "promise": "broken" if broken else None,
            "time_range_ns": ranges,
            "remarks": tuple(words),
        }

    def _own_times(self, best: Comparison) -> tuple[float, float] | None:
        """The least and the most of a kernel's medians, where they differ by more than chance and by much; else None."""
        same = [p for p in self.pairs if p.believed and (p.kernel, p.config) == (best.kernel, best.config)]
        low, high = (choose(same, key=lambda p: p.time_ns) for choose in (min, max))
        if high.time_ns <= _OWN_TIME_SPREAD * low.time_ns or high.time().low <= low.time().high:
            return None
        return low.time_ns, high.time_ns


def _call(pair: Comparison) -> tuple[Said, list[str]]:
    """The verdict on a comparison, with what there is to say of it."""
    interval, bias = pair.interval, pair.control.bias
    if interval.pairs < MIN_PAIRS:
        return "undecided", [f"{interval.pairs} pairs of samples; {MIN_PAIRS} are the least that decide"]
    said = call(interval)
    shows = [f"the samples would show a difference of {interval.detectable:.1%}, no less"] if said == "undecided" else []
    return said, shows + ([f"widened by {bias:.1%} (A/A control)"] if bias else [])


def _verdict(
    trust: Trust, conditions: Conditions, kernel: str, origin: Origin | None, verdict: Said, reason: str | None, **values: Any
) -> Verdict:
    problem, clock, cache = conditions
    header = trust.run.header
    about = {name: getattr(header, name) for name in ("suite", "run", "started", "commit")}
    about |= {"op": parse_problem(problem).op, "gpu": trust.gpu_name, "config": ""}
    about |= {"quick": trust.quick, "unfinished": problem not in trust.finished}
    said = {"kernel": kernel, "origin": origin, "verdict": verdict, "reason": reason}
    return Verdict(problem=problem, clock=clock, cache=cache, **(about | said | values))


def _never_timed(trust: Trust, groups: Iterable[Conditions], said: Iterable[Verdict]) -> list[Verdict]:
    """Refused verdicts for kernels that were stopped before the clocks, or of which a clock's samples were not kept."""
    known = {(verdict.kernel, verdict.problem, verdict.clock) for verdict in said}
    default: Conditions = ("", "eager" if trust.gpu_name == "cpu" else "graph", "cold")
    rows = []
    for problem, kernel, config in trust.failed():
        measured = sorted((group for group in groups if group[0] == problem), key=lambda group: group[1:] != default[1:])
        silent = [group for group in measured or [(problem, *default[1:])] if (kernel, *group[:2]) not in known]
        reason = trust.never_timed(problem, kernel, config)
        if not silent or reason is None or (len(silent) < len(measured) and not trust.samples_refused(problem, kernel)):
            continue
        known.add((kernel, *silent[0][:2]))
        origin = trust.origins.get(kernel)
        rows.append(_verdict(trust, silent[0], kernel, origin, "refused", reason, config=config))
    return rows


def _time_order(pair: Comparison) -> tuple[bool, float]:
    return (pair.quick, pair.time_ns)
