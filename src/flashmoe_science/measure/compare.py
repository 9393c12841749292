"""The timing of one problem: a control, then every rival in pairs, and the checks that samples must pass.

A kernel of the package and its peers are timed in one process. A function of a user is timed in a child together with its
rivals, and its rivals once more in a child without the function; ``sandbox.checks`` adds further checks.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashmoe_science.hardware.floor import floor_ns
from flashmoe_science.kernel import Device
from flashmoe_science.measure import l2_cache
from flashmoe_science.measure.bench import conditions
from flashmoe_science.measure.channel import Channel, Died, Failed, Tampered, TooLittleMemory
from flashmoe_science.measure.clocks import FEW, FEW_CPU, FULL, FULL_CPU, QUICK_SAMPLES, impossible, paired
from flashmoe_science.measure.inputs import MAX_SETS, Case, sets_beyond
from flashmoe_science.measure.on_problem import OnProblem
from flashmoe_science.measure.request import Entry
from flashmoe_science.records import Cache, Clock, Stage

_GPU_POOL = 16 * 2**30  # bytes that more than two input sets may take
_CPU_POOL = 32 * 2**20  # bytes of input sets, so that a sample seldom uses the same values twice
_CPU_SETS = 512
_OTHER_INPUTS = 10**6  # added to the seed: the clocks' inputs are not those of the exam
_ATTEMPTS = 2  # of a pair that this machine's other work may have spoilt
_STEPS = 128  # scales are multiples of 1/128, which every dtype holds exactly
_scales: list[float] = []  # shuffled, not used yet

Pair = tuple[list[int], list[int]]


class Unreliable(Exception):
    """A time cannot be trusted; the message is the reason."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage: Stage = stage


class UnreliableRival(Unreliable):
    """The rival's time cannot be trusted."""


class NoClock(Unreliable):
    """A clock cannot time the call: one that waits for the host cannot be captured in a CUDA graph."""


@dataclass(slots=True)
class Timed:
    """An entry on a clock, behind a channel. ``quick_ns`` is the median of its quick bench, nanoseconds a call. ``claimed`` and
    ``walls`` are nanoseconds a sample by its clock and by this process's."""

    entry: Entry
    channel: Channel
    clock: Clock
    slot: int
    calls: int
    quick_ns: float = math.nan
    claimed: list[float] = field(default_factory=list)
    walls: list[int] = field(default_factory=list)

    def sample(self) -> float:
        """Nanoseconds a call, as the child reports; a value that is no time counts as 0, which is refused."""
        claimed = self.channel.ask("sample", slot=self.slot).get("ns")
        time = float(claimed) if isinstance(claimed, int | float) and math.isfinite(claimed) else 0.0
        self.claimed.append(time * self.calls)
        self.walls.append(self.channel.last_wall_ns)
        return time

    def unsampled(self) -> Timed:
        """A copy without samples."""
        return replace(self, claimed=[], walls=[])

    def quick(self) -> Timed:
        """Set ``quick_ns`` by a few samples of the entry alone. Returns the same object."""
        self.quick_ns = statistics.median(self.sample() for _ in range(QUICK_SAMPLES))
        return self

    def cut(self, path: str) -> dict[str, Any]:
        """Stop a sample after a random call and write the call's output to ``path``; the answer has the index of the input
        set."""
        return self.channel.ask("sample", slot=self.slot, cut_at=random.random(), path=path)

    def shown(self, path: str) -> dict[str, Any]:
        """Write the output of a random call of the sample that was timed last on the wall clock; answers as ``cut``."""
        return self.channel.ask("show", slot=self.slot, which=random.random(), path=path)


def random_scale() -> float:
    """A factor for the inputs of the next pair, from 1/2 to 3/2. All are used before one is repeated, as a function may cache
    its results."""
    if not _scales:
        every = range(_STEPS // 2, 3 * _STEPS // 2 + 1)
        _scales.extend(step / _STEPS for step in random.sample(every, len(every)))
    return _scales.pop()


def input_sets(device: Device, input_bytes: int, read_bytes: int) -> tuple[int, Cache]:
    """The number of input sets, and whether they leave the L2 cold; a CPU's caches are not managed and count as warm.
    ``read_bytes`` are those that one call reads, which behind a window are a small part of a KV cache."""
    if device is None:
        return max(2, min(_CPU_SETS, _CPU_POOL // max(1, input_bytes))), "warm"
    wanted = sets_beyond(device.l2_bytes, max(1, read_bytes))
    fit = wanted <= MAX_SETS and wanted * input_bytes <= max(_GPU_POOL, 2 * input_bytes)
    return (wanted, "cold") if fit else (2, "warm")


class Comparer:
    """Times entries against each other; every row is recorded as it is measured. ``voids``: a subject whose pair gives no
    number has none at all on the problem."""

    voids = False

    def __init__(self, on: OnProblem) -> None:
        self.on, self.session, self.bench, self.problem = on, on.session, on.session.bench, on.problem
        request, on_cpu = on.session.request, self.bench.gpu is None
        self.sampling = (FEW_CPU if on_cpu else FEW) if request.quick else (FULL_CPU if on_cpu else FULL)
        reads = min(on.input_bytes, self.problem.input_bytes() or self.problem.min_bytes())  # of experts those that are chosen
        self.sets, self.cache = input_sets(self.bench.gpu, on.input_bytes, reads)
        self._seed = request.seed + _OTHER_INPUTS
        self.path, self._scale = str(on.worker.folder / "timed"), 1.0

    def ranked(self, entries: Sequence[Entry], clock: Clock, where: Channel | None = None) -> list[Timed]:
        """The entries that a clock can time, the fastest first, each by a few samples of it alone."""
        timed = []
        for entry in entries:
            self.on.step(f"quick bench ({clock}) of {entry}")
            try:
                timed.append(self.prepared(where or self.on.worker, entry, clock).quick())
            except Unreliable as error:
                self._not_ranked(entry, clock, error)
            except TooLittleMemory as error:
                self.session.refuse("timing", str(error), self.problem, entry)
            except (Failed, Died) as error:
                self._not_ranked(entry, clock, _does_not_run(clock, error))
        return sorted(timed, key=lambda one: one.quick_ns)

    def _not_ranked(self, entry: Entry, clock: Clock, error: Unreliable) -> None:
        """Refuse an entry that a clock cannot time. A kernel of ours that fails in a call is wrong."""
        wrong = entry.origin == "ours" and not isinstance(error, NoClock)
        self.session.refuse("correctness" if wrong else "timing", str(error), self.problem, entry)

    def against(self, subjects: Sequence[Timed], rivals: Sequence[Timed]) -> None:
        """Time the best subject against itself and every rival; every other subject against the two best rivals."""
        best, *others = subjects
        self.pair(best, None)
        for index, rival in enumerate(rivals):
            self.pair(best, rival, best_rival=index == 0)
        for subject in others:
            for rival in rivals[:2]:
                self.pair(subject, rival)
        self.refresh(random_scale())
        try:
            self.judge(best, best.cut)  # a call in a sample, on new values
        finally:
            self.refresh(1.0)

    def eagerly(self, best: Entry, rivals: Sequence[Entry]) -> None:
        """Time eager calls: the best subject against itself, the best rival and the framework's own operator."""
        ranked = self.ranked([best], "eager")
        if ranked:  # the rivals in the order in which the device's clock had them
            order = [rival for index, rival in enumerate(rivals) if index == 0 or rival.name == self.on.framework]
            self.against(ranked, [timed for rival in order for timed in self.ranked([rival], "eager")])

    def pair(self, own: Timed, rival: Timed | None, best_rival: bool = False) -> Pair | None:
        """Measure a row of pairs, in a second attempt if the first fails; None, and a refusal, if both fail. ``rival`` of
        None is the control: the same kernel prepared again. Raises Unreliable: the subject failed a check in every attempt."""
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                return self._attempt(own, rival, best_rival)
            except UnreliableRival as error:
                if last and rival is not None:
                    self.session.refuse("timing", str(error), self.problem, rival.entry)
            except Unreliable as error:
                if error.stage == "correctness" or (last and self.voids):
                    raise
                if last:
                    self.session.refuse(error.stage, str(error), self.problem, own.entry)
        return None

    def _attempt(self, own: Timed, rival: Timed | None, best_rival: bool) -> Pair:
        """Measure one row of pairs. Raises Unreliable where the samples are no measurement."""
        against = own.entry if rival is None else rival.entry
        self.on.step(f"{own.clock} clock: {own.entry} against {against.name}")
        mine, other = self.samplers_of(own, rival)
        before, began = self.bench.telemetry(), time.monotonic()
        own_ns, other_ns = paired(mine.sample, other.sample, self.sampling, lambda index: self.before_pair(mine, index))
        seconds, after = time.monotonic() - began, self.bench.telemetry()
        self.after_pairs(mine, other)
        floor = floor_ns(self.problem, self.bench.gpu, self.cache)
        for samples, one in ((own_ns, mine), (other_ns, other)):
            # A CPU that also does other work may take twice as long at any moment.
            reason = impossible(samples, floor, None if self.bench.gpu is None else one.quick_ns)
            if reason is not None:
                kind = UnreliableRival if one is other and rival is not None else Unreliable
                raise kind("sanity", f"{reason} ({own.clock} clock)")
        if rival is not None:
            self.check_pair(mine, other, (own_ns, other_ns), best_rival)
        how = {"clock": own.clock, "cache": self.cache, "calls": mine.calls, "input_sets": self.sets}
        how |= conditions(before, after) | {"device_seconds": round(seconds, 4)}
        self.session.timed(self.problem, own.entry, against, a=own_ns, b=other_ns, **how)
        return own_ns, other_ns

    def prepared(self, where: Channel, entry: Entry, clock: Clock) -> Timed:
        """An entry on a clock behind a channel. Raises NoClock, or UnreliableRival where it does not run."""
        how = {"clock": clock, "sets": self.sets, "cache": self.cache, "seed": self._seed}
        try:
            answer = where.ask("prepare", who=entry.who, config=entry.config, **how)
        except (Failed, Died) as error:
            if isinstance(error, Tampered) or not entry.who:
                raise
            raise _does_not_run(clock, error) from error
        if "cannot" in answer:
            raise NoClock("timing", str(answer["cannot"]))
        return Timed(entry, where, clock, int(answer["slot"]), int(answer["calls"]))

    def refresh(self, scale: float) -> None:
        """Write new values to every input set."""
        self._scale = scale
        self.on.worker.ask("refresh", scale=scale)

    def judge(self, own: Timed, fetch: Callable[[str], dict[str, Any]]) -> None:
        """Check an output of a timed sample. Raises Unreliable where it is wrong: the graph left NaN from before, the same bits
        come back on other values, or the error exceeds its bound."""
        found = self._check_sampled_output(fetch)
        if not found["reasons"]:
            return
        what, unwritten = found["reasons"][0], any(one["nonfinite"] for one in found["stats"].values())
        if own.clock == "graph" and unwritten:
            raise Unreliable("correctness", f"it skips work when it is timed, and leaves its output unwritten: {what}")
        self.refresh(random_scale())
        own.sample()
        again = self._check_sampled_output(fetch)
        if again["reasons"] and again["digest"] == found["digest"] != "":
            raise Unreliable("correctness", f"it skips work when it is timed, and returns the answer of another call: {what}")
        raise Unreliable("correctness", f"a timed sample is wrong, on values that the exam did not have: {what}")

    def _check_sampled_output(self, fetch: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """The oracle's result for an output of a sample. Raises Unreliable where there is no output."""
        shown = fetch(self.path)
        if not shown["plain"]:
            raise Unreliable("correctness", "in a timed sample it returned something else than plain tensors")
        case = Case(self._seed + int(shown["set"]), scale=self._scale)
        return self.on.oracle.ask("check", case=case, path=self.path, count=int(shown["count"]))

    # Overridden by ``sandbox.checks`` -----------------------------------------------------------------------------------

    def samplers_of(self, own: Timed, rival: Timed | None) -> tuple[Timed, Timed]:
        """The two samplers of a row, each with the time of a quick bench."""
        other = self.prepared(self.on.worker, own.entry, own.clock).quick() if rival is None else rival
        return own.unsampled(), other.unsampled()

    def before_pair(self, own: Timed, index: int) -> None:
        """Called before each pair; before the first one it releases the part of the L2 that is set aside."""
        if index == 0 and self.bench.gpu is not None:
            l2_cache.release()

    def after_pairs(self, own: Timed, other: Timed) -> None:
        """Called after the last pair. Raises Unreliable."""
        aside = l2_cache.set_aside_bytes() if self.bench.gpu is not None else None
        if aside:
            raise Unreliable("sanity", f"{aside} bytes of the L2 are set aside for lines that stay")

    def check_pair(self, own: Timed, rival: Timed, samples: Pair, best_rival: bool) -> None:
        """Called with the samples of a pair. Raises Unreliable where there is a reason not to trust them."""


def _does_not_run(clock: Clock, error: Exception) -> UnreliableRival:
    return UnreliableRival("timing", f"it does not run on the {clock} clock: {error}")
