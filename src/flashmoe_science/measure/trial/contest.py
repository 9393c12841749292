"""The clocks of one candidate on one problem: a control, then every rival in pairs, and the checks that make them numbers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

from flashmoe_science.judge.stats import Interval
from flashmoe_science.measure.bench import Bench, conditions
from flashmoe_science.measure.inputs import MAX_SETS, sets_beyond
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.measure.sanity import floor_ns, impossible
from flashmoe_science.measure.timing import FEW, FULL, Sampling
from flashmoe_science.measure.trial.cases import Case
from flashmoe_science.measure.trial.duel import (
    REMEMBERED,
    SLOWED,
    Remote,
    beside_over_alone,
    disagreement,
    duel,
    new_over_met,
    ping_ns,
    random_scale,
)
from flashmoe_science.measure.trial.hidden import done_ahead, put_off
from flashmoe_science.measure.trial.rivals import Rival
from flashmoe_science.measure.trial.warden import Answers, Child, Died, Failed
from flashmoe_science.problem import Problem
from flashmoe_science.records import Cache, Clock, RefusalRow, Stage, TimingRow

_FULL_CPU = Sampling(least=12, most=40, seconds=2.0)  # samples are longer there than those of our own kernels
_FEW_CPU = Sampling(least=6, most=16, seconds=0.8)
_CPU_POOL = 32 * 2**20  # bytes of input sets, so that a sample seldom meets the same values twice
_CPU_SETS = 512
_SUSPECT = 1.3  # of a rival's time without the candidate: one that is not the best is compared only beyond it
_ATTEMPTS = 2  # of a pair that this machine's other work may have spoilt
_USERS = "sdpa"


class Untrue(Exception):
    """A number that cannot be believed; the message says why."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage: Stage = stage


class RivalUntrue(Untrue):
    """The number is the rival's."""


class NoClock(Untrue):
    """A call that a clock cannot time: one that waits for the host cannot be captured in a CUDA graph."""


class Contest:
    """Times on one problem. ``host`` holds the candidate and its rivals, ``clean`` the rivals alone."""

    def __init__(
        self,
        bench: Bench,
        problem: Problem,
        ledger: Ledger,
        name: str,
        host: Child,
        clean: Child,
        oracle: Answers,
        quick: bool,
        seed: int,
        input_bytes: int,
        step: Callable[[str], None],
    ) -> None:
        self.bench, self.problem, self.ledger, self.name = bench, problem, ledger, name
        self.host, self.clean, self.oracle, self.step = host, clean, oracle, step
        self.quick, self.seed = quick, seed + 10**6
        full, few = (_FULL_CPU, _FEW_CPU) if bench.gpu is None else (FULL, FEW)
        self._sampling = few if quick else full
        self.sets, self.cache = _sets(bench, max(1, input_bytes))
        self._alone_ns: dict[tuple[str, Clock], float] = {}  # of rivals, in the process without the candidate
        self._timed, self._scale = str(host.folder / "timed"), 1.0
        self.against_best: tuple[list[int], list[int], str] | None = None  # own and rival's samples, and who it was

    def go(self, rivals: Sequence[tuple[Rival, str]]) -> None:
        """The device's clock against every rival; on a GPU also what a user waits, against the best one and PyTorch's.

        A candidate that the device's clock cannot time has what a user waits against every rival. Each row is recorded as it is
        measured. A candidate that is caught later has no number here all the same: the refusal that whoever catches this error
        records voids what was recorded before.

        Raises:
            Untrue: a number of the candidate's that is none.
        """
        on_device = self.bench.gpu is not None and self._on_device(rivals)
        order = self._ranked(rivals, "eager")
        if on_device:
            order = [one for index, one in enumerate(order) if index == 0 or one[0].who == _USERS]
        self._on(self._prepared(self.host, "", "", "eager"), order)

    def _on_device(self, rivals: Sequence[tuple[Rival, str]]) -> bool:
        """The device's own time, if it can be told."""
        try:
            own = self._prepared(self.host, "", "", "graph")
        except NoClock as error:
            self.ledger.note(f"no time of the device's own, only what a user waits: {error}", self.problem, self.name)
            return False
        self._on(own, self._ranked(rivals, "graph"))
        return True

    def _ranked(self, rivals: Sequence[tuple[Rival, str]], clock: Clock) -> list[tuple[Rival, str]]:
        """The rivals that a clock can time, the fastest first, in the process without the candidate."""
        times: list[tuple[float, int, Rival, str]] = []
        for rival, config in rivals:
            self.step(f"quick bench ({clock}) of {rival.who}")
            try:
                times.append((self._prepared(self.clean, rival.who, config, clock).quick(), len(times), rival, config))
            except NoClock as error:
                self.ledger.note(f"no {clock} clock: {error}", self.problem, rival.who)
            except Untrue as error:
                self._rival_refused(rival, config, str(error))
        self._alone_ns |= {(rival.who, clock): took for took, _, rival, _ in times}
        if times:
            text = ", ".join(f"{rival.who}: {took:.0f} ns" for took, _, rival, _ in sorted(times, key=lambda one: one[:2]))
            self.ledger.note(f"rivals without {self.name}, quick bench ({clock}): {text}", self.problem)
        return [(rival, config) for _, _, rival, config in sorted(times, key=lambda one: one[:2])]

    def _on(self, own: Remote, order: Sequence[tuple[Rival, str]]) -> None:
        if own.clock == "eager":
            self._remembers_nothing(own)
        self._paired(own, None, "")
        for index, (rival, config) in enumerate(order):
            samples = self._paired(own, rival, config, compare=index == 0)
            if index == 0 and samples is not None and self.against_best is None:
                self.against_best = (*samples, rival.who)

    def _remembers_nothing(self, own: Remote) -> None:
        """Raises Untrue where new values take it longer than those that it has met."""
        self.step("new values against values that it has met")
        found = new_over_met(own, self.sets)
        if found is None:
            return
        if found.low > REMEMBERED:
            text = f"new values take it {found.ratio:.2f} times as long as values that it has met"
            raise Untrue("timing", f"it remembers answers: {text}")
        self.ledger.note(
            f"its time on new values, over that on values that it has met: {_told(found)}", self.problem, self.name
        )

    def _paired(
        self, own: Remote, rival: Rival | None, config: str, compare: bool = False
    ) -> tuple[list[int], list[int]] | None:
        """A row of pairs; a second attempt where the first is no number. None, and a refusal, where the rival gives none.

        ``rival`` of None is the candidate against itself. ``compare``: hold the rival, the best, to its time without the
        candidate, and the candidate to what it does where no clock runs.

        Raises:
            Untrue: the candidate's last attempt was no number either.
        """
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                return self._attempt(own, rival, config, compare)
            except RivalUntrue as error:
                if last:
                    assert rival is not None
                    self._rival_refused(rival, config, str(error))
            except Untrue as error:
                if error.stage == "correctness" or last:
                    raise
        return None

    def _attempt(self, own: Remote, rival: Rival | None, config: str, compare: bool) -> tuple[list[int], list[int]]:
        who, clock = self.name if rival is None else rival.who, own.clock
        self.step(f"{clock} clock against {who}")
        own, other = own.again(), self._prepared(self.host, "" if rival is None else rival.who, config, clock)
        self._refresh()
        quick = own.quick(), other.quick()
        before, began = self.bench.telemetry(), time.monotonic()
        looked_at = (0, random.randrange(1, self._sampling.least))  # pairs; which one, no candidate can foresee
        own_ns, other_ns = duel(own, other, self._sampling, lambda index: self._between(own, index in looked_at))
        seconds, after = time.monotonic() - began, self.bench.telemetry()
        self._between(own, look=True)  # what has begun to skip work since has not stopped
        ping = ping_ns(self.host)
        floor = floor_ns(self.problem, self.bench.gpu, self.cache)
        for remote, samples, expected in ((own, own_ns, quick[0]), (other, other_ns, quick[1])):
            kind = Untrue if rival is None or remote is own else RivalUntrue
            reason = disagreement(remote, ping)
            if reason is not None:
                raise Untrue("timing", reason)
            # A CPU that also does other work may take twice as long at any moment.
            reason = impossible(samples, floor, None if self.bench.gpu is None else expected)
            if reason is not None:
                raise kind("sanity", f"{reason} ({clock} clock)")
        if rival is not None and (compare or min(other_ns) > _SUSPECT * self._alone_ns.get((who, clock), math.inf)):
            self._not_slowed(other, rival, config)
        if compare:
            self._nothing_hidden(own, other, (min(own_ns), min(other_ns)))
        self.ledger.add(
            TimingRow(
                run=self.ledger.run,
                problem=str(self.problem),
                op=self.problem.op,
                kernel=self.name,
                origin="candidate",
                config="",
                rival=who,
                rival_origin="candidate" if rival is None else rival.origin,
                rival_config=config,
                clock=clock,
                cache=self.cache,
                calls=own.calls,
                input_sets=self.sets,
                a=own_ns,
                b=other_ns,
                **conditions(before, after),
                device_seconds=round(seconds, 4),
                quick=self.quick,
            )
        )
        return own_ns, other_ns

    def _not_slowed(self, beside: Remote, rival: Rival, config: str) -> None:
        """Raises Untrue where a rival takes longer in the candidate's process than in one without it."""
        self.step(f"{beside.clock} clock: {rival.who} with and without the candidate")
        found = beside_over_alone(beside, self._prepared(self.clean, rival.who, config, beside.clock))
        if found is None:
            return
        if found.low > SLOWED:
            raise Untrue(
                "timing",
                f"the rival was slowed in the candidate's process: {_told(found)} times its time without the candidate",
            )
        text = f"its time beside {self.name}, over that without ({beside.clock} clock): {_told(found)}"
        self.ledger.note(text, self.problem, rival.who)

    def _nothing_hidden(self, own: Remote, beside: Remote, times: tuple[float, float]) -> None:
        """Raises Untrue where it works while no clock runs. ``times``: the least ns a call, its own and its rival's."""
        self.step("work where no clock runs")
        reason = done_ahead(own.child, self.clean, *times, self.sets) or put_off(own, beside, *times)
        if reason is not None:
            raise Untrue("timing", reason)

    def _prepared(self, where: Child, who: str, config: str, clock: Clock) -> Remote:
        """A player on a clock, in the candidate's process or the clean one. Raises Untrue where the clock cannot time it."""
        try:
            said = where.ask("prepare", who=who, config=config, clock=clock, sets=self.sets, cache=self.cache, seed=self.seed)
        except (Failed, Died) as error:
            if where is self.clean:
                raise RivalUntrue("timing", f"it does not run without the candidate: {error}") from error
            raise
        if "cannot" in said:
            raise NoClock("timing", str(said["cannot"]))
        return Remote(where, clock, int(said["slot"]), int(said["calls"]))

    def _refresh(self) -> None:
        self._scale = random_scale()
        self.host.ask("refresh", scale=self._scale)

    def _between(self, own: Remote, look: bool) -> None:
        """New values in every input set. With ``look``, two outputs of the candidate's are held to the oracle: one from the
        sample that was timed last, and then that of a call at which a sample is cut."""
        if look and own.clock == "eager":
            self._judge(own.shown(self._timed))
        self._refresh()
        if look:
            self._judge(own.cut(self._timed))

    def _judge(self, handed_over: tuple[int, bool]) -> None:
        """Raises Untrue where an output from a sample, of this input set, is wrong."""
        chosen, plain = handed_over
        if not plain:
            raise Untrue("correctness", "in a timed sample it returned something else than plain tensors")
        case = Case(self.seed + chosen, scale=self._scale)
        reasons = self.oracle.ask("check", case=case.as_dict(), path=self._timed)["reasons"]
        if reasons:
            raise Untrue("correctness", f"it skips work when it is timed: in a timed sample {reasons[0]}")

    def _rival_refused(self, rival: Rival, config: str, reason: str) -> None:
        self.ledger.add(
            RefusalRow(
                run=self.ledger.run,
                stage="timing",
                problem=str(self.problem),
                kernel=rival.who,
                config=config,
                reason=reason,
            )
        )


def _told(found: Interval) -> str:
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def _sets(bench: Bench, input_bytes: int) -> tuple[int, Cache]:
    """How many input sets, and whether they leave the L2 cold (a CPU's caches are not managed here)."""
    if bench.gpu is None:
        return max(2, min(_CPU_SETS, _CPU_POOL // input_bytes)), "warm"
    wanted = sets_beyond(bench.gpu.l2_bytes, input_bytes)
    return (wanted, "cold") if wanted <= MAX_SETS else (2, "warm")
