"""A profile's run, row by row, on a GPU that answers as told; and the one call that Nsight Compute is shown."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.probe import Telemetry
from flashmoe_science.judge.diagnose.diagnosis import diagnose
from flashmoe_science.measure import channel, run_once
from flashmoe_science.measure import session as module
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.channel import Died
from flashmoe_science.measure.profile.profile import run_profile, subject
from flashmoe_science.measure.request import Request
from flashmoe_science.measure.session import Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CallPathRow, NoteRow, ProfileRow, RefusalRow, Row, RunRow, TimingRow
from flashmoe_science.store import Run

PROBLEM = "attn b1 h1 q512 d64 fp16"
CANDIDATE = "mine.py:fn"
LAUNCH = {"name": "mine", "grid": [8, 1, 1], "block": [256, 1, 1], "shared_bytes": 1024, "registers": 64, "stream": 7}

NCU = """#!{python}
import sys
from pathlib import Path
if "--version" in sys.argv:
    print("Version 2025.3.1.0")
elif "--import" in sys.argv:
    names = '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum"'
    print(names + ',"dram__throughput.avg.pct_of_peak_sustained_elapsed"')
    print('"","","","","ns","%"')
    print('"0","mine","(256, 1, 1)","(8, 1, 1)","52,000","3.5"')
else:
    Path(sys.argv[sys.argv.index("--export") + 1]).write_bytes(b"x")
"""


class Card(Bench):
    """An H200 as far as rows are concerned."""

    def telemetry(self) -> Telemetry:
        return Telemetry(sm_clock_mhz=1980)


class Answers:
    """A child that answers by name; a slot's samples are 52 us on the graph's clock and 80 us on the other."""

    asked: list[tuple[str, dict[str, Any]]]
    told: dict[str, Any]
    folder, alive, last_wall_ns = Path("folder"), True, 0

    def __init__(self, module: str, watchdog_s: float, settings: None) -> None:
        self.slots: list[str] = []

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.asked.append((do, what))
        told = f"{do} {what.get('clock', '')}".strip()  # "prepare graph" is one clock's
        if told in self.told:
            answer = self.told[told]
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)
        if do == "prepare":
            self.slots.append(what["clock"])
            return {"slot": len(self.slots) - 1, "calls": 100}
        if do == "sample":
            return {"ns": 52_000.0 if self.slots[what["slot"]] == "graph" else 80_000.0}
        return {"launches": [["", "", [[LAUNCH]]]]} if do == "launches" else {}

    def close(self) -> None: ...


Ran = Callable[..., list[Row]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    """Profile CANDIDATE on PROBLEM with what the child is told to answer."""
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "bin" / "ncu"
    script.parent.mkdir()
    script.write_text(NCU.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(script.parent))

    def run(told: dict[str, Any] | None = None, who: str = CANDIDATE) -> list[Row]:
        answers = type("Told", (Answers,), {"asked": [], "told": told or {}})
        monkeypatch.setattr(channel.Home, "kind", answers)
        bench, rows = Card(torch.device("cpu"), GPUS["h200"]), list[Row]()
        monkeypatch.setattr(module.Recorder, "begin", lambda self, *given: rows.append(header(self.run)))

        class Sink:
            def append(self, row: Row) -> None:
                rows.append(row)

        one = subject(who, parse_problem(PROBLEM), None, bench)
        session = Session(bench, Sink(), Request(quick=True), lambda *step: None)
        run_profile(session, [one], tmp_path, with_ceilings=False)
        return rows

    return run


def header(run: str) -> RunRow:
    environment = {
        "gpu": "NVIDIA H200", "sm_count": 132, "cpu": "x", "cpu_count": 1, "platform": "x", "python": "x", "torch": "x",
        "triton": None,
    }  # fmt: skip
    return RunRow.model_validate(
        {
            "run": run, "started": "2026-01-01T00:00:00+00:00", "suite": "profile", "command": [], "commit": None,
            "source_digest": "0", "seed": 1, "environment": environment,
        }
    )  # fmt: skip


def test_launches_both_clocks_and_counters_are_recorded_and_diagnosed(ran: Ran, tmp_path: Path) -> None:
    rows = ran()
    (path,) = (row for row in rows if isinstance(row, CallPathRow))
    assert (path.kernel, path.launches[0].grid, path.broken_promises) == (CANDIDATE, (8, 1, 1), [])
    timing = [row for row in rows if isinstance(row, TimingRow)]
    assert [(row.clock, row.origin, row.rival, row.cache) for row in timing] == [
        ("graph", "candidate", CANDIDATE, "cold"),
        ("eager", "candidate", CANDIDATE, "cold"),
    ]
    assert set(timing[0].a + timing[0].b) == {52_000}
    (counted,) = (row for row in rows if isinstance(row, ProfileRow))
    assert (counted.time_ns, counted.tool, counted.absent) == (52_000.0, "ncu 2025.3.1.0", None)
    assert [path.name for path in tmp_path.glob("*.ncu-rep")] == ["mine.py-fn-on-attn-b1-h1-q512-d64-fp16.ncu-rep"]
    found = diagnose(Run(rows[0], tuple(rows[1:])), PROBLEM, CANDIDATE)  # type: ignore[arg-type]
    assert found["small-grid"].status == "supported"
    assert found["host-bound"].status == "supported"
    assert found["dram-bound"].evidence.endswith("of the DRAM's peak bandwidth is in use")


def test_enough_sets_leave_the_l2_cold(ran: Ran) -> None:
    (row, _) = (row for row in ran() if isinstance(row, TimingRow))
    assert row.input_sets * parse_problem(PROBLEM).min_bytes() * 3 / 4 > 2 * GPUS["h200"].l2_bytes


def test_who_does_not_run_is_refused_and_not_profiled(ran: Ran) -> None:
    rows = ran({"problem": Died("it crashed: SIGSEGV, an illegal memory access")})
    (refusal,) = (row for row in rows if isinstance(row, RefusalRow))
    assert (refusal.stage, refusal.kernel) == ("profile", CANDIDATE)
    assert refusal.reason == "it does not run: it crashed: SIGSEGV, an illegal memory access"
    assert not [row for row in rows if isinstance(row, TimingRow | ProfileRow)]


def test_a_graph_that_cannot_be_captured_leaves_the_other_clock(ran: Ran) -> None:
    rows = ran({"prepare graph": {"cannot": "its CUDA graph could not be captured"}})
    assert {row.reason for row in rows if isinstance(row, RefusalRow)} == {
        "its CUDA graph could not be captured",
    }
    assert [row.absent for row in rows if isinstance(row, ProfileRow)] == [None]


def test_a_blind_profiler_is_noted_and_counters_still_tell_the_launch(ran: Ran) -> None:
    rows = ran({"launches": {"blind": "CUPTI is missing"}})
    assert [row.text for row in rows if isinstance(row, NoteRow)] == ["launches were not seen: CUPTI is missing"]
    found = diagnose(Run(rows[0], tuple(rows[1:])), PROBLEM, CANDIDATE)  # type: ignore[arg-type]
    assert found.facts.blocks == 8


def test_ours_is_held_to_its_promise(ran: Ran) -> None:
    chosen = subject("fwd_triton", parse_problem(PROBLEM), None, Card(torch.device("cpu"), GPUS["h200"])).entry.config
    rows = ran({"launches": {"launches": [["fwd_triton", chosen, [[LAUNCH]]]]}}, "fwd_triton")
    (path,) = (row for row in rows if isinstance(row, CallPathRow))
    assert "promised a kernel named" in path.broken_promises[0]
    assert path.config


def test_a_config_is_of_a_kernel_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    bench, problem = Card(torch.device("cpu"), GPUS["h200"]), parse_problem(PROBLEM)
    assert subject("fwd_triton", problem, "block_m=16 block_n=64", bench).entry.config == "block_m=16 block_n=64"
    with pytest.raises(ValueError, match="is a function, which has none"):
        subject(CANDIDATE, problem, "block_m=16", bench)
    with pytest.raises(ValueError, match="config word 'fast' is not name=integer"):
        subject("fwd_triton", problem, "fast", bench)


def test_the_profiler_is_shown_one_call_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    (tmp_path / "seen.py").write_text(
        "calls = []\n\ndef fn(q, k, v, causal=False, softmax_scale=None):\n    calls.append('call')\n    return q\n"
    )
    run_once.main(f"{tmp_path}/seen.py:fn", "", "attn b1 h1 q16 d16 fp32", 3)
    calls = sys.modules["candidate_seen"].calls
    assert (calls, events) == (["call"] * 4, ["start", "stop"])
    if bench_here().gpu is None:
        events.clear()
        run_once.main("sdpa", "", "attn b1 h1 q16 d16 fp32", 3)
        assert events == ["start", "stop"]
