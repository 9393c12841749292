"""Runs in, verdicts out. Pure: the same records give the same verdicts on any machine.

A verdict is about one kernel on one problem, GPU, clock and cache. Kernels are compared only where they were sampled in pairs,
so never across runs, shapes, GPUs or clocks. For each of our kernels the rival is the best peer: the one with the least time
beside it. For each peer the rival is our best kernel, or the best other peer in a run without ours. For a kernel that a user
brought it is the best of all others.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from flashmoe_science.judge.pairs import Pair, pair_of
from flashmoe_science.judge.stats import MIN_PAIRS, Interval, call
from flashmoe_science.judge.trust import Control, Trust, is_control
from flashmoe_science.judge.verdict import Said, Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Cache, Clock, Origin, TimingRow
from flashmoe_science.store import Run

__all__ = ["Verdict", "judged", "superseded", "verdicts", "verdicts_of"]

Conditions = tuple[str, Clock, Cache]  # problem, clock, cache

_UNPAIRED_LEAD = 0.98  # a peer that was not paired with a kernel is taken to beat its rival only when clearly ahead


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Verdicts that stand: of the runs that speak of a problem on a GPU in a suite, the latest one's.

    A quick run does not replace a full one, and a run that put a user's kernel on trial replaces only runs that tried the same.
    The order is that of gpu, suite, then the latest run's own.

    Raises:
        ProblemError: a record's problem does not parse.
    """
    return judged(runs)[0]


def judged(runs: Sequence[Run]) -> tuple[list[Verdict], list[Verdict]]:
    """Verdicts that stand, as ``verdicts`` says, and those of earlier runs that no longer do: the history, oldest run first."""
    latest: dict[tuple[str, str, str, tuple[str, ...]], list[Verdict]] = {}
    every: list[Verdict] = []
    for run in sorted(runs, key=_age):
        own = verdicts_of(run)
        every += own
        tried = tuple(sorted({verdict.kernel for verdict in own if verdict.brought}))
        by_problem: dict[tuple[str, str, str, tuple[str, ...]], list[Verdict]] = defaultdict(list)
        for verdict in own:
            by_problem[verdict.gpu, verdict.suite, verdict.problem, tried].append(verdict)
        for key, rows in by_problem.items():
            before = latest.get(key)
            if before and _is_quick(rows) and not _is_quick(before):
                continue
            latest.pop(key, None)
            latest[key] = rows
    in_order = sorted(latest.items(), key=lambda item: item[0][:2])
    standing = [verdict for _, rows in in_order for verdict in rows]
    stand = set(map(id, standing))
    return standing, [verdict for verdict in every if id(verdict) not in stand]


def superseded(runs: Sequence[Run]) -> list[Verdict]:
    """Verdicts of earlier runs that no longer stand: the history, oldest run first."""
    return judged(runs)[1]


def verdicts_of(run: Run) -> list[Verdict]:
    """Every verdict of one run, in the order in which it met its problems."""
    trust = Trust(run)
    groups: dict[Conditions, list[TimingRow]] = defaultdict(list)
    for row in run.rows:
        if isinstance(row, TimingRow) and not is_control(row):
            groups[row.problem, row.clock, row.cache].append(row)
    said: list[Verdict] = []
    for conditions, rows in groups.items():
        said += _Group(trust, conditions, rows).verdicts()
    said += _never_timed(trust, groups, said)
    met = {text: place for place, text in enumerate(dict.fromkeys(verdict.problem for verdict in said))}
    return sorted(said, key=lambda verdict: met[verdict.problem])


class _Group:
    """The timing rows of one run under one set of conditions."""

    def __init__(self, trust: Trust, conditions: Conditions, rows: Sequence[TimingRow]) -> None:
        self.trust, self.conditions = trust, conditions
        self.problem = parse_problem(conditions[0])
        self.refusal = trust.whole_problem(conditions[0])
        pairs = [pair_of(trust, self.problem, row) for row in rows]
        self.pairs = pairs + [pair.flipped() for pair in pairs]
        self.best: dict[str, Pair] = {}  # kernel -> the believed pair of its best config, any rival
        for pair in sorted(self.pairs, key=_time_order):
            if pair.believed:
                self.best.setdefault(pair.kernel, pair)

    def verdicts(self) -> list[Verdict]:
        ours, peers, brought = self._of("ours"), self._of("peer"), self._of("candidate")
        champions = sorted((self.best[kernel] for kernel in ours if kernel in self.best), key=_time_order)
        rows = [self._verdict(kernel, peers if not brought or self._beside(kernel, peers) else brought) for kernel in ours]
        for kernel in brought:  # of the other candidates, those that were named as its rivals
            named = [pair.rival for pair in self._beside(kernel, brought) if pair.rival != kernel]
            rows.append(self._verdict(kernel, [*peers, *ours, *named]))
        for peer in peers:
            beside = [kernel.kernel for kernel in champions if self._beside(peer, [kernel.kernel])]
            rows.append(self._verdict(peer, beside[:1] or brought or [other for other in peers if other != peer]))
        return rows

    def _of(self, origin: Origin) -> list[str]:
        return [kernel for kernel in self._kernels() if self._origin(kernel) == origin]

    def _kernels(self) -> list[str]:
        return list(dict.fromkeys(pair.kernel for pair in self.pairs))

    def _origin(self, kernel: str) -> Origin:
        return next(pair.origin for pair in self.pairs if pair.kernel == kernel)

    def _beside(self, kernel: str, rivals: Iterable[str]) -> list[Pair]:
        """Believed pairs of the kernel's best config with these rivals, full samples before quick ones, best rival first."""
        if kernel not in self.best:
            return []
        wanted, config = set(rivals), self.best[kernel].config
        found = [p for p in self.pairs if p.believed and p.kernel == kernel and p.config == config and p.rival in wanted]
        return sorted(found, key=lambda pair: (pair.quick, pair.interval.ratio if pair.interval else 0.0))

    def _verdict(self, kernel: str, rivals: Sequence[str]) -> Verdict:
        fault = self.refusal or self._control(kernel).reason or self._fault(kernel)
        if fault:
            return _verdict(self.trust, self.conditions, kernel, self._origin(kernel), verdict="refused", reason=fault)
        beside = self._beside(kernel, rivals)
        if not beside:
            own = self.best.get(kernel)
            return self._with_times(kernel, own, reason="no rival that can be believed was timed beside it")
        pair = beside[0]
        ahead = [
            peer
            for peer in rivals
            if peer in self.best
            and self.best[peer].time_ns < _UNPAIRED_LEAD * pair.rival_time_ns
            and not any(p.rival == peer for p in beside)
        ]
        if ahead:
            return self._with_times(kernel, pair, reason=f"{ahead[0]}, the best of the rivals, was not timed beside it")
        return self._judged(pair)

    def _control(self, kernel: str) -> Control:
        return self.trust.control(*self.conditions, kernel)

    def _unmet(self, pair: Pair) -> tuple[str, ...]:
        """Peers that could have been the best one of ours' rivals, had they a number here."""
        if pair.origin != "ours" or self.conditions[1] != "graph":  # the eager clock is kept for the few that users call
            return ()
        return tuple(peer for peer in self.trust.able_peers(self.conditions[0]) if peer not in self.best)

    def _fault(self, kernel: str) -> str | None:
        """Why none of this kernel's pairs is believed, where that is of its own making or of the samples'."""
        pairs = [pair for pair in self.pairs if pair.kernel == kernel]
        config = self.best[kernel].config if kernel in self.best else None
        impossible = [pair.own_fault for pair in pairs if pair.config == config and pair.own_fault]
        if impossible:  # beside one rival it took a time that it cannot take: what it took beside others is no better
            return impossible[0]
        faults = [pair.own_fault or pair.shared_fault for pair in pairs]
        return None if None in faults else faults[0]

    def _judged(self, pair: Pair) -> Verdict:
        assert pair.interval is not None  # a believed pair has one
        verdict = self._with_times(pair.kernel, pair, reason=None)
        bias = self._control(pair.kernel).bias
        interval = pair.interval.widened(bias)
        said, reason = _call(interval, bias)
        unmet = self._unmet(pair)
        lacking = f"no number of {', '.join(unmet)} to compare with" if unmet else None
        reason = "; ".join(filter(None, (reason, lacking))) or None
        return dataclasses.replace(
            verdict,
            verdict=said,
            reason=reason,
            rival=pair.rival,
            rival_config=pair.rival_config,
            rival_origin=pair.rival_origin,
            rival_time_ns=pair.rival_time_ns,
            ratio=interval.ratio,
            low=interval.low,
            high=interval.high,
            pairs=interval.pairs,
            outliers=interval.outliers,
            detectable=interval.detectable,
            unmet=unmet,
            interval=interval,
        )

    def _with_times(self, kernel: str, pair: Pair | None, reason: str | None) -> Verdict:
        """An undecided verdict with the kernel's own time, speed and memory, where a pair is believed."""
        verdict = _verdict(self.trust, self.conditions, kernel, self._origin(kernel), verdict="undecided", reason=reason)
        if pair is None:
            return verdict
        extra, output = self.trust.memory(self.conditions[0], kernel, pair.config)
        control, queries = self._control(kernel).interval, self.problem.queries()
        return dataclasses.replace(
            verdict,
            config=pair.config,
            time_ns=pair.time_ns,
            tflops=self.problem.flops() / pair.time_ns / 1e3,
            gbps=self.problem.min_bytes() / pair.time_ns,
            spread=pair.spread,
            queries_per_second=None if queries is None else queries / pair.time_ns * 1e9,
            control_low=control.low if control else None,
            control_high=control.high if control else None,
            peak_extra_bytes=extra,
            output_bytes=output,
        )


def _call(interval: Interval, bias: float) -> tuple[Said, str | None]:
    """The verdict on an interval that ``bias`` has widened, with what there is to say of it."""
    if interval.pairs < MIN_PAIRS:
        return "undecided", f"{interval.pairs} pairs of samples; {MIN_PAIRS} are the least that decide"
    said = call(interval)
    reasons = []
    if said == "undecided":
        reasons.append(f"the samples would show a difference of {interval.detectable:.1%}, no less")
    if bias:
        reasons.append(f"widened by {bias:.1%} (A/A control)")
    return said, "; ".join(reasons) or None


def _verdict(
    trust: Trust,
    conditions: Conditions,
    kernel: str,
    origin: Origin | None,
    *,
    verdict: Said,
    reason: str | None,
    config: str = "",
) -> Verdict:
    header = trust.run.header
    return Verdict(
        problem=conditions[0],
        op=parse_problem(conditions[0]).op,
        gpu=trust.gpu_name,
        suite=header.suite,
        kernel=kernel,
        config=config,
        origin=origin,
        clock=conditions[1],
        cache=conditions[2],
        run=header.run,
        started=header.started,
        commit=header.commit,
        verdict=verdict,
        reason=reason,
        quick=trust.quick,
    )


def _never_timed(trust: Trust, groups: Iterable[Conditions], said: Iterable[Verdict]) -> list[Verdict]:
    """Refused verdicts for kernels that were stopped before the clocks, or of which a clock's samples were not kept."""
    spoken = {(verdict.kernel, verdict.problem, verdict.clock) for verdict in said}
    default: Conditions = ("", "eager" if trust.gpu_name == "cpu" else "graph", "cold")
    rows = []
    for problem, kernel, config in trust.failed():
        met = sorted((group for group in groups if group[0] == problem), key=lambda group: group[1:] != default[1:])
        silent = [group for group in met or [(problem, *default[1:])] if (kernel, *group[:2]) not in spoken]
        at_the_clock = trust.clock_refusal(problem, kernel)
        reason = at_the_clock or trust.kernel(problem, kernel, config)
        if not silent or reason is None or (not at_the_clock and len(silent) < len(met)):
            continue
        spoken.add((kernel, *silent[0][:2]))
        origin = trust.origins.get(kernel)
        rows.append(_verdict(trust, silent[0], kernel, origin, verdict="refused", reason=reason, config=config))
    return rows


def _time_order(pair: Pair) -> tuple[bool, float]:
    return (pair.quick, pair.time_ns)


def _age(run: Run) -> tuple[str, str]:
    return (run.header.started, run.header.run)


def _is_quick(rows: Sequence[Verdict]) -> bool:
    return all(row.quick for row in rows)
