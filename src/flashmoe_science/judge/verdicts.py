"""Verdicts on one kernel on one problem, GPU, clock and cache, from a run's records. Pure: the same records, the same verdicts.

Kernels are compared only where they were sampled in pairs, so never across runs, shapes, GPUs or clocks. For each of our
kernels the rival is the best peer: the one with the least time paired with it. For each peer the rival is our best kernel, or
the best other peer in a run without ours. For a user's kernel it is the best of all others. ``standing`` picks the run whose
verdicts count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.formats import microseconds, within
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.stats import MIN_PAIRS, Interval, call
from flashmoe_science.judge.trust import Trust
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import ONE_GPU, Cache, Clock, Origin

Conditions = tuple[str, Clock, Cache]  # problem, clock, cache
Judgement = Literal["faster", "slower", "equivalent", "undecided", "refused"]

_UNPAIRED_LEAD = 0.98  # of the rival's time, below which a peer that was not paired with the kernel is the better rival
_OWN_TIME_SPREAD = 1.25  # from which on the ratio of a kernel's medians beside two rivals is remarked on


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one kernel under one set of conditions.

    ``ratio`` is the rival's time over the kernel's (above 1: the kernel is faster), with its 95% interval ``low`` to ``high``.
    A refused verdict holds no number at all. Times are median nanoseconds a call; ``tflops`` is 1e12 FLOP/s and ``gbps`` 1e9
    bytes/s of the least traffic that the problem needs; ``spread`` is the interquartile range of the times over their median;
    ``queries_per_second`` counts batch times queries. ``detectable`` is the relative difference that the samples could show.
    ``unmeasured`` are peers that could have been the rival and have no number. ``control_low`` and ``control_high`` are of the
    kernel-against-itself control. ``promise`` is "broken" where the kernel promised more speed than it reached;
    ``time_range_ns`` is the least and most of its own medians where those differ by its rival. ``efficiency``, of a kernel on N
    GPUs, is the time of one GPU's call of the whole problem over N times its own. ``remarks`` has the last three in words.
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
    verdict: Judgement = "undecided"
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
    unmeasured: tuple[str, ...] = ()
    promise: Literal["broken"] | None = None
    time_range_ns: tuple[float, float] | None = None
    efficiency: float | None = None
    remarks: tuple[str, ...] = ()
    interval: Interval | None = field(default=None, repr=False, compare=False)

    @property
    def brought(self) -> bool:
        """Whether the kernel is a user's."""
        return is_brought(self.kernel, self.origin)

    @property
    def of_ours(self) -> bool:
        """Whether it is on one of our kernels. Compared with a user's kernel, ours is only a rival."""
        return self.origin == "ours" and self.rival_origin != "candidate"

    @property
    def label(self) -> str:
        """The verdict as it is shown: "slower", or "slower, promise broken"."""
        return f"{self.verdict}, promise {self.promise}" if self.promise else self.verdict

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON or CSV, without the interval and what ``reason`` has in words. Fields of remarks are left
        out where they are empty."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("interval", "unmeasured")}
        return {name: value for name, value in values.items() if value or name not in _REMARKED}


_REMARKED = ("unfinished", "promise", "time_range_ns", "efficiency", "remarks")


def is_brought(kernel: str, origin: Origin | None) -> bool:
    """Whether a kernel is a user's. Where no row gives its origin (it was refused before any was written), its name does:
    those of users are module:function."""
    return origin == "candidate" or (origin is None and ":" in kernel)


def verdicts_of(trust: Trust, pairs: Iterable[Comparison]) -> list[Verdict]:
    """Every verdict of a run, by its comparisons, in the order of its problems. Raises ProblemError: one does not parse."""
    groups: dict[Conditions, list[Comparison]] = grouped(pairs, lambda pair: (pair.problem, pair.clock, pair.cache))
    rows = [row for conditions, members in groups.items() for row in _Group(trust, conditions, members).verdicts()]
    rows += _never_timed(trust, groups, rows)
    return [row for own in grouped(rows, lambda row: row.problem).values() for row in own]


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
        rows = [self._verdict(kernel, peers if not brought or self._pairs_with(kernel, peers) else brought) for kernel in ours]
        for kernel in brought:  # of the other candidates, those that were named as its rivals
            named = [pair.rival for pair in self._pairs_with(kernel, brought) if pair.rival != kernel]
            rows.append(self._verdict(kernel, [*peers, *ours, *named]))
        for peer in peers:
            own = [one.kernel for one in fastest_first if self._pairs_with(peer, [one.kernel])]
            rows.append(self._verdict(peer, own[:1] or brought or [other for other in peers if other != peer]))
        return rows

    def _pairs_with(self, kernel: str, rivals: Iterable[str]) -> list[Comparison]:
        """Believed pairs of the kernel's best config with these rivals, full samples before quick ones, best rival first."""
        if kernel not in self.best:
            return []
        wanted, config = set(rivals), self.best[kernel].config
        found = [p for p in self.pairs if p.believed and p.kernel == kernel and p.config == config and p.rival in wanted]
        return sorted(found, key=lambda pair: (pair.quick, pair.interval.ratio))

    def _verdict(self, kernel: str, rivals: Sequence[str]) -> Verdict:
        def row(verdict: Judgement, reason: str | None, **values: Any) -> Verdict:
            return _verdict(self.trust, self.conditions, kernel, verdict, reason, origin=self.origins[kernel], **values)

        if fault := self._fault(kernel):
            return row("refused", fault)
        found = self._pairs_with(kernel, rivals)
        if not found:
            times = self._times(self.best[kernel]) if kernel in self.best else {}
            return row("undecided", "no rival that can be believed was timed beside it", **times)
        pair = found[0]
        least, paired = _UNPAIRED_LEAD * pair.rival_time_ns, {one.rival for one in found}
        ahead = [name for name in rivals if name in self.best and name not in paired and self.best[name].time_ns < least]
        if ahead:
            return row("undecided", f"{ahead[0]}, the best of the rivals, was not timed beside it", **self._times(pair))
        verdict, reasons = _call(pair)
        # Peers that could have been the best, had they a number; the eager clock is kept for the few that users call.
        able = self.trust.correct_peers(self.conditions[0]) if pair.origin == "ours" and self.conditions[1] == "graph" else []
        unmeasured = tuple(peer for peer in able if peer not in self.best)
        if unmeasured:
            reasons.append(f"no number of {', '.join(unmeasured)} to compare with")
        ratio = {name: getattr(pair, name) for name in ("rival", "rival_config", "rival_origin", "rival_time_ns", "interval")}
        ratio |= {name: getattr(pair.interval, name) for name in ("ratio", "low", "high", "pairs", "outliers", "detectable")}
        return row(verdict, "; ".join(reasons) or None, unmeasured=unmeasured, **self._times(pair), **ratio)

    def _fault(self, kernel: str) -> str | None:
        """Why none of this kernel's pairs is trusted, where the fault is its own or the samples'."""
        pairs = [pair for pair in self.pairs if pair.kernel == kernel]
        config = self.best[kernel].config if kernel in self.best else None
        impossible = [pair.fault for pair in pairs if pair.config == config and pair.fault]
        if impossible:  # an impossible time with one rival discredits the times with others
            return impossible[0]
        faults = [pair.fault or pair.shared_fault for pair in pairs]
        return None if None in faults else faults[0]

    def _times(self, pair: Comparison) -> dict[str, Any]:
        """A kernel's own time, speed and memory, by one of its comparisons, with remarks: a broken promise, a time that depends
        on the rival, the efficiency on several GPUs."""
        extra, output = self.trust.memory(pair.problem, pair.kernel, pair.config)
        control, queries = pair.control.interval, self.problem.queries()
        broken, ranges = self.trust.promises.get((pair.problem, pair.kernel)), self._own_times(pair)
        words = [f"promise broken: {broken}"] if broken else []
        if ranges:
            low, high = map(microseconds, ranges)
            words.append(f"its own time ranged from {low} to {high} us beside different rivals")
        one_gpu, gpus = self._pairs_with(pair.kernel, [ONE_GPU]), self.problem.gpus()
        efficiency = one_gpu[0].interval.ratio / gpus if one_gpu and pair.kernel != ONE_GPU else None
        if efficiency is not None:
            ends = within(*(end / gpus for end in (one_gpu[0].interval.low, one_gpu[0].interval.high)))
            words.append(f"efficiency {efficiency:.3f} [{ends}]: one GPU's time over {gpus} times its own")
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
            "efficiency": efficiency,
            "remarks": tuple(words),
        }

    def _own_times(self, best: Comparison) -> tuple[float, float] | None:
        """The least and the greatest of a kernel's medians beside different rivals, where they differ by more than chance and
        more than _OWN_TIME_SPREAD; else None."""
        same = [p for p in self.pairs if p.believed and (p.kernel, p.config) == (best.kernel, best.config)]
        low, high = (choose(same, key=lambda p: p.time_ns) for choose in (min, max))
        if high.time_ns <= _OWN_TIME_SPREAD * low.time_ns or high.time().low <= low.time().high:
            return None
        return low.time_ns, high.time_ns


def _call(pair: Comparison) -> tuple[Judgement, list[str]]:
    """The verdict on a comparison, with remarks on it."""
    interval, bias = pair.interval, pair.control.bias
    if interval.pairs < MIN_PAIRS:
        return "undecided", [f"{interval.pairs} pairs of samples; {MIN_PAIRS} are the least that decide"]
    verdict = call(interval)
    shows = [f"the samples would show a difference of {interval.detectable:.1%}, no less"] if verdict == "undecided" else []
    return verdict, shows + ([f"widened by {bias:.1%} (A/A control)"] if bias else [])


def _verdict(
    trust: Trust, conditions: Conditions, kernel: str, verdict: Judgement, reason: str | None, **values: Any
) -> Verdict:
    problem, clock, cache = conditions
    header = trust.run.header
    about = {name: getattr(header, name) for name in ("suite", "run", "started", "commit")}
    about |= {"op": parse_problem(problem).op, "gpu": trust.gpu_name, "config": ""}
    about |= {"quick": trust.quick, "unfinished": problem not in trust.finished}
    own = {"kernel": kernel, "verdict": verdict, "reason": reason}
    return Verdict(problem=problem, clock=clock, cache=cache, **(about | own | values))


def _never_timed(trust: Trust, groups: Iterable[Conditions], timed: Iterable[Verdict]) -> list[Verdict]:
    """Refused verdicts for kernels that were stopped before the clocks, or of which a clock's samples were not kept."""
    judged = {(verdict.kernel, verdict.problem, verdict.clock) for verdict in timed}
    default: Conditions = ("", "eager" if trust.gpu_name == "cpu" else "graph", "cold")
    rows = []
    for problem, kernel, config in trust.failed():
        measured = sorted((group for group in groups if group[0] == problem), key=lambda group: group[1:] != default[1:])
        untimed = [group for group in measured or [(problem, *default[1:])] if (kernel, *group[:2]) not in judged]
        reason = trust.never_timed(problem, kernel, config)
        if not untimed or reason is None or (len(untimed) < len(measured) and not trust.samples_refused(problem, kernel)):
            continue
        judged.add((kernel, *untimed[0][:2]))
        origin = trust.origins.get(kernel)
        rows.append(_verdict(trust, untimed[0], kernel, "refused", reason, origin=origin, config=config))
    return rows


def _time_order(pair: Comparison) -> tuple[bool, float]:
    return (pair.quick, pair.time_ns)
