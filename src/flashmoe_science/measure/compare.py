"""The clocks on one problem: a control, then every rival in pairs, and the checks that make them numbers.

A kernel of the package and its peers are timed in one process. A function that a user brought is timed in a child, its rivals
beside it, and its rivals once more in a child without it; ``sandbox.checks`` holds it to more than this module does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe_science.hardware.floor import floor_ns
from flashmoe_science.kernel import Device
from flashmoe_science.measure import l2_cache
from flashmoe_science.measure.bench import conditions
from flashmoe_science.measure.channel import Channel, Died, Failed
from flashmoe_science.measure.clocks import FEW, FEW_CPU, FULL, FULL_CPU, impossible, paired
from flashmoe_science.measure.inputs import MAX_SETS, Case, sets_beyond
from flashmoe_science.measure.on_problem import OnProblem
from flashmoe_science.measure.request import Entry
from flashmoe_science.measure.samplers import RemoteSampler, random_scale
from flashmoe_science.records import Cache, Clock, Stage, TimingRow

_CPU_POOL = 32 * 2**20  # bytes of input sets, so that a sample seldom meets the same values twice
_CPU_SETS = 512
_OTHER_INPUTS = 10**6  # added to the seed: the clocks' inputs are not those of the exam
_ATTEMPTS = 2  # of a pair that this machine's other work may have spoilt

Pair = tuple[list[int], list[int]]


class Untrue(Exception):
    """A number that cannot be believed; the message says why."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage: Stage = stage


class RivalUntrue(Untrue):
    """The number is the rival's."""


class NoClock(Untrue):
    """A call that a clock cannot time: one that waits for the host cannot be captured in a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An entry on a clock, with the median of its quick bench in nanoseconds a call."""

    entry: Entry
    sampler: RemoteSampler
    quick_ns: float


def input_sets(device: Device, input_bytes: int) -> tuple[int, Cache]:
    """How many input sets, and whether they leave the L2 cold (a CPU's caches are not managed here)."""
    if device is None:
        return max(2, min(_CPU_SETS, _CPU_POOL // max(1, input_bytes))), "warm"
    wanted = sets_beyond(device.l2_bytes, max(1, input_bytes))
    return (wanted, "cold") if wanted <= MAX_SETS else (2, "warm")


def _does_not_run(clock: Clock, error: Exception) -> RivalUntrue:
    return RivalUntrue("timing", f"it does not run on the {clock} clock: {error}")


class Comparer:
    """Times entries against each other; every row is recorded as it is measured. ``voids``: a subject whose pair gives no
    number has none at all on the problem."""

    voids = False

    def __init__(self, on: OnProblem) -> None:
        self.on, self.session, self.bench, self.problem = on, on.session, on.session.bench, on.problem
        request, on_cpu = on.session.request, self.bench.gpu is None
        self.sampling = (FEW_CPU if on_cpu else FEW) if request.quick else (FULL_CPU if on_cpu else FULL)
        self.sets, self.cache = input_sets(self.bench.gpu, on.input_bytes)
        self._seed = request.seed + _OTHER_INPUTS
        self._prepared: dict[tuple[int, Entry, Clock], RemoteSampler] = {}
        self.path, self._scale = str(on.worker.folder / "timed"), 1.0

    def ranked(self, entries: Sequence[Entry], clock: Clock, where: Channel | None = None) -> list[Timed]:
        """The entries that a clock can time, the fastest first, each by a few samples of it alone."""
        timed = []
        for entry in entries:
            self.on.step(f"quick bench ({clock}) of {entry}")
            try:
                sampler = self.prepared(where or self.on.worker, entry, clock)
                timed.append(Timed(entry, sampler, sampler.quick()))
            except Untrue as error:
                self._not_ranked(entry, clock, error)
            except (Failed, Died) as error:
                self._not_ranked(entry, clock, _does_not_run(clock, error))
        timed.sort(key=lambda one: one.quick_ns)
        return timed

    def _not_ranked(self, entry: Entry, clock: Clock, error: Untrue) -> None:
        """Refuse what has no number on a clock. A kernel of ours that fails in a call is wrong."""
        wrong = entry.implementation.origin == "ours" and not isinstance(error, NoClock)
        self.session.refuse("correctness" if wrong else "timing", str(error), self.problem, entry)

    def against(self, subjects: Sequence[Timed], rivals: Sequence[Timed]) -> None:
        """The best subject against itself and every rival; every other subject against the two best rivals."""
        best, *others = subjects
        self.pair(best, None)
        for index, rival in enumerate(rivals):
            self.pair(best, rival, best_rival=index == 0)
        for subject in others:
            for rival in rivals[:2]:
                self.pair(subject, rival)
        self.look_at_a_timed_call(best)

    def eagerly(self, best: Entry, rivals: Sequence[Entry]) -> None:
        """What a user waits: the best subject against itself, the best rival and the framework's own operator."""
        ranked = self.ranked([best], "eager")
        if ranked:  # the rivals in the order in which the device's clock had them
            order = [rival for index, rival in enumerate(rivals) if index == 0 or rival.name == self.on.framework]
            self.against(ranked, [timed for rival in order for timed in self.ranked([rival], "eager")])

    def pair(self, own: Timed, rival: Timed | None, best_rival: bool = False) -> Pair | None:
        """A row of pairs, a second attempt where the first is no number. None, and a refusal, where there is none.

        ``rival`` of None is the control: the same kernel prepared a second time.

        Raises:
            Untrue: the subject is caught at something, on every attempt.
        """
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                return self.attempt(own, rival, best_rival)
            except RivalUntrue as error:
                if last and rival is not None:
                    self.session.refuse("timing", str(error), self.problem, rival.entry)
            except Untrue as error:
                if error.stage == "correctness" or (last and self.voids):
                    raise
                if last:
                    self.session.refuse(error.stage, str(error), self.problem, own.entry)
        return None

    def attempt(self, own: Timed, rival: Timed | None, best_rival: bool) -> Pair:
        """One row of pairs. Raises Untrue where it is no number."""
        clock = own.sampler.clock
        name = own.entry.name if rival is None else rival.entry.name
        self.on.step(f"{clock} clock: {own.entry} against {name}")
        mine, other, expected = self.samplers_of(own, rival)
        before, began = self.bench.telemetry(), time.monotonic()
        own_ns, other_ns = paired(mine.sample, other.sample, self.sampling, lambda index: self.before_pair(mine, index))
        seconds, after = time.monotonic() - began, self.bench.telemetry()
        self.after_pairs(mine, other, rival)
        self._possible(own_ns, other_ns, expected, clock, control=rival is None)
        self.believed(mine, other, rival, (own_ns, other_ns), best_rival)
        against = own.entry if rival is None else rival.entry
        self.session.add(
            TimingRow(
                run=self.session.run,
                problem=str(self.problem),
                op=self.problem.op,
                kernel=own.entry.name,
                origin=own.entry.implementation.origin,
                config=own.entry.config,
                rival=against.name,
                rival_origin=against.implementation.origin,
                rival_config=against.config,
                clock=clock,
                cache=self.cache,
                calls=mine.calls,
                input_sets=self.sets,
                a=own_ns,
                b=other_ns,
                **conditions(before, after),
                device_seconds=round(seconds, 4),
                quick=self.on.session.request.quick,
            )
        )
        return own_ns, other_ns

    def _possible(
        self, own_ns: list[int], other_ns: list[int], expected: tuple[float, float], clock: Clock, control: bool
    ) -> None:
        floor = floor_ns(self.problem, self.bench.gpu, self.cache)
        for index, samples in enumerate((own_ns, other_ns)):
            # A CPU that also does other work may take twice as long at any moment.
            quick = None if self.bench.gpu is None else expected[index]
            reason = impossible(samples, floor, quick)
            if reason is not None:
                kind = Untrue if control or index == 0 else RivalUntrue
                raise kind("sanity", f"{reason} ({clock} clock)")

    def prepared(self, where: Channel, entry: Entry, clock: Clock, again: bool = False) -> RemoteSampler:
        """An entry on a clock behind a channel; ``again`` prepares it once more. Raises NoClock, or RivalUntrue where it does
        not run."""
        key = (id(where), entry, clock)
        if key in self._prepared and not again:
            return self._prepared[key].again()
        how = {"clock": clock, "sets": self.sets, "cache": self.cache, "seed": self._seed}
        try:
            answer = where.ask("prepare", who=entry.who, config=entry.config, **how)
        except (Failed, Died) as error:
            if entry.who:
                raise _does_not_run(clock, error) from error
            raise
        if "cannot" in answer:
            raise NoClock("timing", str(answer["cannot"]))
        sampler = RemoteSampler(where, clock, int(answer["slot"]), int(answer["calls"]))
        if not again:
            self._prepared[key] = sampler
        return sampler.again()

    # What ``sandbox.checks`` does more of ------------------------------------------------------------------------------------

    def samplers_of(self, own: Timed, rival: Timed | None) -> tuple[RemoteSampler, RemoteSampler, tuple[float, float]]:
        """The two samplers of a row, and what a quick bench found of each."""
        if rival is not None:
            return own.sampler.again(), rival.sampler.again(), (own.quick_ns, rival.quick_ns)
        other = self.prepared(self.on.worker, own.entry, own.sampler.clock, again=True)
        return own.sampler.again(), other, (own.quick_ns, other.quick())

    def before_pair(self, own: RemoteSampler, index: int) -> None:
        """Called ahead of each pair; nothing for a kernel of the package but for the L2, once."""
        if index == 0 and self.bench.gpu is not None:
            l2_cache.release()

    def after_pairs(self, own: RemoteSampler, other: RemoteSampler, rival: Timed | None) -> None:
        """Called after the last pair. Raises Untrue."""
        aside = l2_cache.set_aside_bytes() if self.bench.gpu is not None else None
        if aside:
            raise Untrue("sanity", f"{aside} bytes of the L2 are set aside for lines that stay")

    def believed(self, own: RemoteSampler, other: RemoteSampler, rival: Timed | None, samples: Pair, best_rival: bool) -> None:
        """Called once the samples are known. Raises Untrue where there is a reason not to believe them."""

    def look_at_a_timed_call(self, own: Timed) -> None:
        """Hold the output of a call in a sample to the oracle, on new values. Raises Untrue where it is wrong."""
        self.refresh(random_scale())
        try:
            self.judge(own.sampler.cut(self.path))
        finally:
            self.refresh(1.0)

    def refresh(self, scale: float) -> None:
        """New values in every input set."""
        self._scale = scale
        self.on.worker.ask("refresh", scale=scale)

    def judge(self, shown: dict[str, Any]) -> None:
        """Raises Untrue where an output from a sample is wrong."""
        if not shown["plain"]:
            raise Untrue("correctness", "in a timed sample it returned something else than plain tensors")
        case = Case(self._seed + int(shown["set"]), scale=self._scale)
        count = int(shown["count"])
        reasons = self.on.oracle.ask("check", case=case.as_dict(), path=self.path, count=count)["reasons"]
        if reasons:
            raise Untrue("correctness", f"it skips work when it is timed: in a timed sample {reasons[0]}")
