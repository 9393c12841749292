"""The comparison of a function that is not trusted, with workers and an oracle of the test: it chooses when work is skipped."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.rows import Rows

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.hardware.probe import Telemetry
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.compare import Timed, Unreliable
from flashmoe_science.measure.on_problem import OnProblem
from flashmoe_science.measure.request import Entry, Request
from flashmoe_science.measure.sandbox.checks import SandboxedComparer, clock_mismatch, deferred_work, work_ahead
from flashmoe_science.measure.session import Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import NoteRow, RefusalRow, TimingRow

CALLS, SAMPLE_NS = 100, 5_000_000.0
OWN, RIVAL, SLOWED = 0, 1, 2


class Sampled:
    """A child with the function in slot 0. Each sample takes as long; ``skips_from`` tells from which of the function's on it
    does nothing that is right, ``waits`` who waits for the host in a call, ``slowed`` which rival takes thrice its time."""

    folder = Path()

    def __init__(self, skips_from: int | None = None, waits: Collection[str] = (), slowed: str | None = None) -> None:
        self._skips_from, self._waits, self._slowed = skips_from, waits, slowed
        self.samples = 0  # of the function's, timed
        self.last_wall_ns = 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.last_wall_ns = 100_000
        if do == "prepare" and what["clock"] == "graph" and what["who"] in self._waits:
            return {"cannot": "its CUDA graph could not be captured"}
        if do == "prepare":
            return {"slot": SLOWED if what["who"] == self._slowed else RIVAL if what["who"] else OWN, "calls": CALLS}
        if do == "show":
            return {"set": 0, "plain": True, "count": 1, "kept": 1}
        if do != "sample":
            return {}
        if what.get("cut_at") is not None:
            return {"set": 0, "plain": True, "count": 1}
        time = SAMPLE_NS * (1 + 0.01 * (self.samples * 7 % 5)) * (3 if what["slot"] == SLOWED else 1)
        self.samples += what["slot"] == OWN
        self.last_wall_ns += round(time)
        return {"ns": time / CALLS}

    @property
    def skipping(self) -> bool:
        return self._skips_from is not None and self.samples >= self._skips_from


class Oracle:
    """Finds what the child gives wrong once that skips: the same bits at each look, or others with ``new_bits``."""

    def __init__(self, child: Sampled, new_bits: bool, nonfinite: int) -> None:
        self._child, self._new_bits, self._looks, self._nonfinite = child, new_bits, 0, nonfinite

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self._looks += self._new_bits
        reasons = ["out: maximum error 0.000361 is above 0.000358"] if self._child.skipping else []
        return {"reasons": reasons, "digest": f"{self._looks}", "stats": {"out": {"nonfinite": self._nonfinite}}}


OWN_ENTRY = Entry("mine.py:attention", "")


def rival(name: str) -> Entry:
    return Entry(name, name)


def comparer(
    skips_from: int | None = None,
    gpu: Gpu | None = None,
    waits: Collection[str] = (),
    slowed: str | None = None,
    new_bits: bool = False,
    nonfinite: int = 0,
) -> tuple[SandboxedComparer, Sampled, Rows]:
    child, rows = Sampled(skips_from, waits, slowed), Rows()
    made = SandboxedComparer(
        OnProblem(
            problem=parse_problem("attn b1 h1 q64 d64 fp32"),
            session=Session(Bench(torch.device("cpu"), gpu), rows, Request(quick=True), lambda *step: None),
            worker=child,
            rivals_worker=Sampled(waits=waits),
            oracle=Oracle(child, new_bits, nonfinite),
            input_bytes=3 * 64 * 64 * 4,
            launches={},
            of="",
        )
    )
    return made, child, rows


def test_an_honest_function_gets_a_control_and_a_row_a_rival() -> None:
    made, _, rows = comparer()
    made.go(OWN_ENTRY, [rival("sdpa")])
    assert [row.rival for row in rows.of(TimingRow)] == ["mine.py:attention", "sdpa"]
    assert not rows.of(RefusalRow)


def test_work_that_is_skipped_from_any_sample_on_is_caught_in_its_stage() -> None:
    """Rows that were written before are on disk; the trial's refusal voids them (tests/unit/judge/test_candidates.py)."""
    made, child, _ = comparer()
    made.go(OWN_ENTRY, [rival("sdpa")])
    for first in range(child.samples + 1):  # the last one stops just before the last look
        caught, _, rows = comparer(first)
        with pytest.raises(Unreliable, match="it skips work when it is timed, and returns the answer of another call") as error:
            caught.go(OWN_ENTRY, [rival("sdpa")])
        assert error.value.stage == "correctness"
        # The sample after which it is looked at a last time belongs to a row that is not written.
        assert [row.rival for row in rows.of(TimingRow)] in ([], ["mine.py:attention"]), first


def test_an_error_in_a_timed_call_is_not_called_skipped_work() -> None:
    """Other values bring other bits: nothing says that the work was not done."""
    caught, _, _ = comparer(0, new_bits=True)
    with pytest.raises(Unreliable, match=r"sample is wrong, .*: out: maximum error 0\.000361 is above 0\.000358$") as error:
        caught.go(OWN_ENTRY, [rival("sdpa")])
    assert error.value.stage == "correctness"
    assert "skips" not in str(error.value)


@pytest.mark.parametrize(("clock", "skips"), [("graph", True), ("eager", False)])
def test_nan_is_work_that_was_skipped_only_where_it_lay_there_before(clock: str, skips: bool, monkeypatch: Any) -> None:
    """The outputs of a graph are filled with NaN before its replay; a call on the wall clock makes its NaN itself."""
    monkeypatch.setattr(Bench, "telemetry", lambda self: Telemetry())
    caught, _, _ = comparer(0, gpu_named("h200") if clock == "graph" else None, new_bits=True, nonfinite=3)
    with pytest.raises(Unreliable) as error:
        caught.go(OWN_ENTRY, [rival("sdpa")])
    assert ("skips work when it is timed, and leaves its output unwritten" in str(error.value)) is skips


@pytest.mark.parametrize("slowed", ["sdpa", "loop"])  # the best rival, and one that is not
def test_a_rival_that_is_slowed_beside_the_function_refuses_it(slowed: str) -> None:
    made, _, _ = comparer(slowed=slowed)
    with pytest.raises(Unreliable, match="the rival was slowed in the function's process"):
        made.go(OWN_ENTRY, [rival("sdpa"), rival("loop")])


@pytest.mark.parametrize(
    ("waits", "on_the_device"),
    [
        (("",), []),
        (("loop",), ["mine.py:attention", "sdpa"]),
        (("", "loop", "sdpa"), []),
        ((), ["mine.py:attention", "sdpa", "loop"]),
    ],
)
def test_a_call_that_no_graph_can_hold_is_timed_as_a_user_waits(
    waits: tuple[str, ...], on_the_device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "telemetry", lambda self: Telemetry())
    made, _, rows = comparer(gpu=gpu_named("h200"), waits=waits)
    made.go(OWN_ENTRY, [rival("sdpa"), rival("loop")])
    timed = [(row.clock, row.rival) for row in rows.of(TimingRow)]
    everyone = ["mine.py:attention", "sdpa", "loop"]
    assert [rival for clock, rival in timed if clock == "graph"] == on_the_device
    # Who has the device's time needs a user's only beside the best and PyTorch's, which are one here.
    assert [rival for clock, rival in timed if clock == "eager"] == (everyone if "" in waits else everyone[:2])
    assert not rows.of(RefusalRow)
    told = {row.kernel for row in rows.of(NoteRow) if "could not be captured" in row.text}
    assert told == ({"mine.py:attention"} if "" in waits else {*waits})


class Claiming:
    """A worker that claims of each sample what ``claim`` makes of the time that it takes here."""

    folder, alive = Path(), True

    def __init__(self, claim: Callable[[float], Any]) -> None:
        self._claim, self._samples, self.last_wall_ns = claim, 0, 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        wall = SAMPLE_NS * (1 + 0.01 * (self._samples * 7 % 5))
        self._samples += 1
        self.last_wall_ns = round(wall + 100_000)
        claimed = self._claim(wall)
        return {"ns": claimed / CALLS if isinstance(claimed, float) else claimed}


def timed(channel: Any) -> Timed:
    return Timed(OWN_ENTRY, channel, "eager", 0, CALLS)


def sampled(claim: Callable[[float], Any]) -> Timed:
    remote = timed(Claiming(claim))
    for _ in range(9):
        remote.sample()
    return remote


def test_an_honest_clock_is_believed() -> None:
    assert clock_mismatch(sampled(lambda wall: wall), 100_000) is None


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.3])
def test_a_clock_that_says_otherwise_is_refused(factor: float) -> None:
    reason = clock_mismatch(sampled(lambda wall: wall * factor), 100_000)
    assert str(reason).startswith("its clock disagrees with the harness's")


@pytest.mark.parametrize("claim", ["soon", None, float("nan"), float("inf")])
def test_what_is_no_time_counts_as_none(claim: Any) -> None:
    assert timed(Claiming(lambda wall: claim)).sample() == 0.0


# Work where no clock runs

RIVAL_NS, SETS, KEPT = 100_000.0, 50, 16
READ_NS, CHANGE_NS = 400_000, 2_000_000


class Taking:
    """Takes ``more`` nanoseconds beyond what reading answers, or changing values, takes by itself; and at times the machine
    holds it up besides."""

    folder = Path()

    def __init__(self, more: float = 0.0) -> None:
        self.more, self.asked, self.last_wall_ns = more, 0, 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.asked += 1
        held_up = 5_000_000 if self.asked % 3 == 0 else 0
        self.last_wall_ns = round({"show": READ_NS, "refresh": CHANGE_NS}.get(do, 0) + self.more + held_up)
        return {"ns": 1.0, "set": 0, "plain": True, "count": 1, "kept": KEPT}


def remote(more: float = 0.0) -> Timed:
    return timed(Taking(more))


def test_an_answer_that_is_made_when_it_is_read_is_named() -> None:
    reason = deferred_work(remote(KEPT * RIVAL_NS), remote(), RIVAL_NS / 10, RIVAL_NS)
    assert reason == ("it defers work until its results are read: reading 16 of them takes 2.00 ms, of its rival's 0.40 ms")


def test_work_while_values_are_changed_is_named() -> None:
    reason = work_ahead(Taking(SETS * RIVAL_NS), Taking(), RIVAL_NS / 10, RIVAL_NS, SETS)
    assert reason == (
        "it works while nothing is timed: writing new values to its 50 input sets takes 7.00 ms, without the function 2.00 ms"
    )


@pytest.mark.parametrize(("more", "own_ns"), [(0.0, RIVAL_NS / 10), (RIVAL_NS, RIVAL_NS / 10), (KEPT * RIVAL_NS, RIVAL_NS)])
def test_who_is_honestly_faster_or_no_faster_is_not_suspected(more: float, own_ns: float) -> None:
    assert deferred_work(remote(more), remote(), own_ns, RIVAL_NS) is None
    assert work_ahead(Taking(more), Taking(), own_ns, RIVAL_NS, SETS) is None
