"""A candidate's clocks, with processes and an oracle that the test plays: it chooses from which sample on work is skipped."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.hardware.probe import Telemetry
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.measure.trial.contest import Contest, Untrue
from flashmoe_science.measure.trial.rivals import Rival
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import NoteRow, RefusalRow, Row, TimingRow

CALLS, SAMPLE_NS = 100, 5_000_000.0
OWN, RIVAL, SLOWED = 0, 1, 2


class Played:
    """A child with the candidate in slot 0. Each sample takes as long; ``skips_from`` tells from which of the candidate's on it
    does nothing that is right, ``waits`` who waits for the host in a call, ``slowed`` which rival takes thrice its time."""

    folder = Path()

    def __init__(self, skips_from: int | None = None, waits: Collection[str] = (), slowed: str | None = None) -> None:
        self._skips_from, self._waits, self._slowed = skips_from, waits, slowed
        self.samples = 0  # of the candidate's, timed
        self.last_wall_ns = 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.last_wall_ns = 100_000
        if do == "prepare" and what["clock"] == "graph" and what["who"] in self._waits:
            return {"cannot": "its CUDA graph could not be captured"}
        if do == "prepare":
            return {"slot": SLOWED if what["who"] == self._slowed else RIVAL if what["who"] else OWN, "calls": CALLS}
        if do == "show":
            return {"set": 0, "plain": True, "kept": 1}
        if do != "sample":
            return {}
        if what.get("cut_at") is not None:
            return {"set": 0, "plain": True}
        time = SAMPLE_NS * (1 + 0.01 * (self.samples * 7 % 5)) * (3 if what["slot"] == SLOWED else 1)
        self.samples += what["slot"] == OWN
        self.last_wall_ns += round(time)
        return {"ns": time / CALLS}

    @property
    def skipping(self) -> bool:
        return self._skips_from is not None and self.samples >= self._skips_from


class Oracle:
    def __init__(self, child: Played) -> None:
        self._child = child

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        return {"reasons": ["out: wrong"] if self._child.skipping else []}


class Rows:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def append(self, row: Row) -> None:
        self.rows.append(row)


def contest(
    skips_from: int | None = None, gpu: Gpu | None = None, waits: Collection[str] = (), slowed: str | None = None
) -> tuple[Contest, Played, Rows]:
    child, rows = Played(skips_from, waits, slowed), Rows()
    made = Contest(
        bench=Bench(torch.device("cpu"), gpu),
        problem=parse_problem("attn b1 h1 q64 d64 fp32"),
        ledger=Ledger("r", rows),
        name="mine.py:attention",
        host=child,
        clean=Played(waits=waits),
        oracle=Oracle(child),
        quick=True,
        seed=0,
        input_bytes=3 * 64 * 64 * 4,
        step=lambda text: None,
    )
    return made, child, rows


def test_an_honest_candidate_gets_a_control_and_a_row_a_rival() -> None:
    made, _, rows = contest()
    made.go([(Rival("sdpa"), "")])
    assert [row.rival for row in rows.rows if isinstance(row, TimingRow)] == ["mine.py:attention", "sdpa"]
    assert not [row for row in rows.rows if isinstance(row, RefusalRow)]


def test_work_that_is_skipped_from_any_sample_on_is_caught_in_its_stage() -> None:
    """Rows that were written before are on disk; the trial's refusal voids them (tests/unit/judge/test_caught_late.py)."""
    made, child, _ = contest()
    made.go([(Rival("sdpa"), "")])
    for first in range(child.samples + 1):  # the last one stops just before the last look
        caught, _, rows = contest(first)
        with pytest.raises(Untrue, match="it skips work when it is timed") as error:
            caught.go([(Rival("sdpa"), "")])
        assert error.value.stage == "correctness"
        # The sample after which it is looked at a last time belongs to a row that is not written.
        assert [row.rival for row in rows.rows if isinstance(row, TimingRow)] in ([], ["mine.py:attention"]), first


@pytest.mark.parametrize("slowed", ["sdpa", "loop"])  # the best rival, and one that is not
def test_a_rival_that_is_slowed_beside_the_candidate_refuses_it(slowed: str) -> None:
    made, _, _ = contest(slowed=slowed)
    with pytest.raises(Untrue, match="the rival was slowed in the candidate's process"):
        made.go([(Rival("sdpa"), ""), (Rival("loop"), "")])


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
    monkeypatch.setattr(Bench, "telemetry", lambda self: Telemetry(absent="played"))
    made, _, rows = contest(gpu=gpu_named("h200"), waits=waits)
    made.go([(Rival("sdpa"), ""), (Rival("loop"), "")])
    timed = [(row.clock, row.rival) for row in rows.rows if isinstance(row, TimingRow)]
    everyone = ["mine.py:attention", "sdpa", "loop"]
    assert [rival for clock, rival in timed if clock == "graph"] == on_the_device
    # Who has the device's time needs a user's only beside the best and PyTorch's, which are one here.
    assert [rival for clock, rival in timed if clock == "eager"] == (everyone if "" in waits else everyone[:2])
    assert not [row for row in rows.rows if isinstance(row, RefusalRow)]
    told = {row.kernel for row in rows.rows if isinstance(row, NoteRow) and "could not be captured" in row.text}
    assert told == ({"mine.py:attention"} if "" in waits else {*waits})
