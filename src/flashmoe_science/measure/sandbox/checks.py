"""The timing of an untrusted function against its rivals, with checks on the times that its process reports.

Values change before every pair; outputs of timed calls are checked against the oracle at random moments; rivals are also timed
without the function; the clock of the function's process is compared with the harness's. Messages are timed, too, while no
clock runs: work that is deferred until a result is read, or done ahead while values change, shows in them. The threat model is
in docs/design/0006.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from flashmoe_science.judge.stats import Interval, ratio_interval
from flashmoe_science.measure.channel import Channel
from flashmoe_science.measure.clocks import Sampling, paired
from flashmoe_science.measure.compare import Comparer, NoClock, Pair, Timed, Unreliable, random_scale
from flashmoe_science.measure.on_problem import OnProblem
from flashmoe_science.measure.request import Entry
from flashmoe_science.records import Clock

_SUSPECT = 1.3  # times its time without the function: a slower rival is checked for being slowed, the best one always
_SLOWED = 1.10  # a rival's time in the function's process over its time without it, beyond which it is not chance
_REMEMBERED = 1.25  # the function's time on new values over that on values seen before, beyond which it remembers results
_ROUNDS, _MAX_OF_SETS = 6, 8
_WITHOUT = Sampling(min_pairs=8, max_pairs=16, seconds=1.5)
_PINGS = 7
_MAX_WALL = 1.5  # of the time claimed: a message takes a tenth of a millisecond, a sample 2 to 10
_MIN_WALL = 0.98
_LOOKS = 25  # of which the least counts: on a busy machine a few may all be disturbed
_CHANGES = 7
_MORE = 1.25  # times what a message takes without the function: less may be chance
_FASTER = 0.7  # of the rival's time: a function that takes more cannot have hidden much work
_OF_LOOK = 0.3  # of the time of as many calls of the rival as results are read: less is not worth hiding
_OF_CHANGE = 0.25  # of the time of one call of the rival on every input set: less is not worth hiding


class SandboxedComparer(Comparer):
    """Times one function against its rivals. A function that is caught cheating has no number on the problem: the refusal that
    the caller of ``go`` records voids earlier rows. ``against_best`` are the samples against the best rival, and its name."""

    voids = True

    def __init__(self, on: OnProblem) -> None:
        super().__init__(on)
        self._without: dict[tuple[str, Clock], Timed] = {}  # rivals, in the process without the function
        self._looked_at: tuple[int, ...] = ()
        self.against_best: tuple[list[int], list[int], str] | None = None

    def go(self, own: Entry, rivals: Sequence[Entry]) -> None:
        """Time on the graph clock against every rival, then on the eager clock against the best one and the framework's own.
        Where the graph clock cannot time the function, the eager clock is used against every rival. Raises Unreliable."""
        on_device = self.bench.gpu is not None
        if on_device:
            try:
                timed = self.prepared(self.on.worker, own, "graph")
            except NoClock as error:
                self.session.note(f"no graph clock, only the eager one: {error}", self.problem, own.name)
                on_device = False
            else:
                self._on(timed, self._rivals(rivals, "graph"))
        order = self._rivals(rivals, "eager")
        if on_device:
            order = [one for index, one in enumerate(order) if index == 0 or one.entry.name == self.on.framework]
        self._on(self.prepared(self.on.worker, own, "eager"), order)

    def _rivals(self, rivals: Sequence[Entry], clock: Clock) -> list[Timed]:
        """The rivals that a clock can time, the fastest first, in the process without the function."""
        timed = self.ranked(rivals, clock, self.on.rivals_worker)
        self._without |= {(one.entry.name, clock): one for one in timed}
        return timed

    def _not_ranked(self, entry: Entry, clock: Clock, error: Unreliable) -> None:
        if isinstance(error, NoClock):
            self.session.note(f"no {clock} clock: {error}", self.problem, entry.name)
        else:
            self.session.refuse("timing", str(error), self.problem, entry)

    def _on(self, own: Timed, rivals: Sequence[Timed]) -> None:
        if own.clock == "eager":
            self._check_memoization(own)
        self.pair(own, None)
        for index, rival in enumerate(rivals):
            samples = self.pair(own, rival, best_rival=index == 0)
            if index == 0 and samples is not None and self.against_best is None:
                self.against_best = (*samples, rival.entry.name)

    def samplers_of(self, own: Timed, rival: Timed | None) -> tuple[Timed, Timed]:
        other = self.prepared(self.on.worker, own.entry if rival is None else rival.entry, own.clock)
        self.refresh(random_scale())
        # Pairs after which an output is looked at: the first, and one that no function can foresee.
        self._looked_at = (0, random.randrange(1, self.sampling.min_pairs))
        return own.unsampled().quick(), other.quick()

    def before_pair(self, own: Timed, index: int) -> None:
        self._between(own, index in self._looked_at)

    def after_pairs(self, own: Timed, other: Timed) -> None:
        self._between(own, look=True)  # what has begun to skip work since has not stopped
        ping = statistics.median(_request_ns(self.on.worker, "ping") for _ in range(_PINGS))
        for one in (own, other):
            reason = clock_mismatch(one, ping)
            if reason is not None:
                raise Unreliable("timing", reason)

    def _between(self, own: Timed, look: bool) -> None:
        """New values in every input set. With ``look``, two outputs of the function are checked against the oracle: one from
        the sample that was timed last, and then that of a call at which a sample is cut."""
        if look and own.clock == "eager":
            self.judge(own, own.shown)
        self.refresh(random_scale())
        if look:
            self.judge(own, own.cut)

    def check_pair(self, own: Timed, rival: Timed, samples: Pair, best_rival: bool) -> None:
        times = (min(samples[0]), min(samples[1]))
        if best_rival or times[1] > _SUSPECT * self._without[rival.entry.name, own.clock].quick_ns:
            self._check_rival_slowdown(rival)
        if best_rival:
            self.on.step("looking for work outside the timed calls")
            reason = work_ahead(own.channel, self.on.rivals_worker, *times, self.sets) or deferred_work(own, rival, *times)
            if reason is not None:
                raise Unreliable("timing", reason)

    def _check_memoization(self, own: Timed) -> None:
        """Raise Unreliable where new values take longer than values seen before: all input sets are used after their values
        changed, and once more. Skipped where that takes many samples: then every timed call has new values."""
        own, samples = own.unsampled(), -(-self.sets // own.calls)
        if samples > _MAX_OF_SETS:
            return
        self.on.step("comparing new values with values seen before")
        new_ns: list[int] = []
        seen_ns: list[int] = []
        for _ in range(_ROUNDS):
            self.refresh(random_scale())
            for times in (new_ns, seen_ns):
                times.append(round(sum(own.sample() for _ in range(samples)) / samples))
        if min(*new_ns, *seen_ns) <= 0:
            return  # a time that is none is refused elsewhere
        found = ratio_interval(seen_ns, new_ns)
        if found.low > _REMEMBERED:
            text = f"new values take {found.ratio:.2f} times as long as values seen before"
            raise Unreliable("timing", f"it remembers results: {text}")
        text = f"its time on new values over its time on values seen before: {_ratio_text(found)}"
        self.session.note(text, self.problem, own.entry.name)

    def _check_rival_slowdown(self, rival: Timed) -> None:
        """Raise Unreliable where a rival takes longer in the function's process than in one without it."""
        name = rival.entry.name
        self.on.step(f"{rival.clock} clock: {name} with and without the function")
        without, beside = self._without[name, rival.clock].unsampled(), rival.unsampled()

        def refresh(_: int) -> None:
            scale = random_scale()
            for one in (beside, without):
                one.channel.ask("refresh", scale=scale)

        without_ns, beside_ns = paired(without.sample, beside.sample, _WITHOUT, refresh)
        if min(*without_ns, *beside_ns) <= 0:
            return
        found = ratio_interval(without_ns, beside_ns)
        if found.low > _SLOWED:
            text = f"the rival was slowed in the function's process: {_ratio_text(found)} times its time without the function"
            raise Unreliable("timing", text)
        text = f"its time beside the function, over that without ({rival.clock} clock): {_ratio_text(found)}"
        self.session.note(text, self.problem, name)


def clock_mismatch(timed: Timed, ping: float) -> str | None:
    """Why the times that a child reports contradict this process's clock; None if they agree. ``ping`` is the round trip of a
    message. The median sample decides: a single sample may be delayed by the machine."""
    pairs = [(wall, max(claimed, 1.0)) for wall, claimed in zip(timed.walls, timed.claimed, strict=True)]
    fits = statistics.median(wall / claimed for wall, claimed in pairs) >= _MIN_WALL
    fills = statistics.median((wall - ping) / claimed for wall, claimed in pairs) <= _MAX_WALL
    if fits and fills:
        return None
    claimed, wall = statistics.median(timed.claimed), statistics.median(timed.walls)
    return f"its clock disagrees with the harness's: it reports {claimed / 1e6:.3f} ms a sample; {wall / 1e6:.3f} ms passed"


def deferred_work(own: Timed, rival: Timed, own_ns: float, rival_ns: float) -> str | None:
    """Why a function seems to compute its results when they are read; None where it does not, and on the graph clock, whose
    replays defer nothing. ``own_ns`` and ``rival_ns`` are the minimum times of a call."""
    if own_ns > _FASTER * rival_ns or own.clock != "eager":
        return None
    looks = [(_read_ns(own), _read_ns(rival)) for _ in range(_LOOKS)]
    (mine, kept), (theirs, of_rival) = min(one for one, _ in looks), min(one for _, one in looks)
    alike = theirs * max(1.0, kept / max(1, of_rival))
    if not _hidden(mine, alike, _OF_LOOK * kept * rival_ns):
        return None
    return (
        f"it defers work until its results are read: reading {kept} of them takes {mine / 1e6:.2f} ms, "
        f"of its rival's {alike / 1e6:.2f} ms"
    )


def work_ahead(own: Channel, without: Channel, own_ns: float, rival_ns: float, sets: int) -> str | None:
    """Why a function seems to compute while new values are written; None where it does not. ``without`` is the process
    without the function, with as many input sets."""
    if own_ns > _FASTER * rival_ns:
        return None
    changes = [[_request_ns(one, "refresh", scale=random_scale()) for one in (own, without)] for _ in range(_CHANGES)]
    with_ns, without_ns = map(min, zip(*changes, strict=True))
    if not _hidden(with_ns, without_ns, _OF_CHANGE * sets * rival_ns):
        return None
    return (
        f"it works while nothing is timed: writing new values to its {sets} input sets takes {with_ns / 1e6:.2f} ms, "
        f"without the function {without_ns / 1e6:.2f} ms"
    )


def _read_ns(one: Timed) -> tuple[int, int]:
    """Nanoseconds that reading the results of a timed sample takes, by this process's clock, and their number."""
    one.sample()
    kept = one.channel.ask("show", slot=one.slot, which=0.0, path="")["kept"]
    return one.channel.last_wall_ns, int(kept)


def _request_ns(channel: Channel, do: str, **what: float) -> int:
    """Nanoseconds that a request takes, by this process's clock."""
    channel.ask(do, **what)
    return channel.last_wall_ns


def _hidden(took: float, without: float, worth: float) -> bool:
    """Whether a message took longer than without the function, and by more than ``worth``."""
    return took > _MORE * without and took - without > worth


def _ratio_text(found: Interval) -> str:
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
