"""What of a kernel is profiled: the one call that Nsight Compute is shown; a CPU's ceilings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.profile import ncu, profile
from flashmoe_science.records import ROW

PROBLEM = "attn b1 h1 q512 d64 fp16"


def test_the_profiler_is_shown_one_call_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    (tmp_path / "seen.py").write_text(
        "calls = []\n\ndef fn(q, k, v, causal=False, softmax_scale=None):\n    calls.append('call')\n    return q\n"
    )
    ncu.main(f"{tmp_path}/seen.py:fn", "", "attn b1 h1 q16 d16 fp32", 3)
    calls = sys.modules["candidate_seen"].calls
    assert (calls, events) == (["call"] * 4, ["start", "stop"])
    if bench_here().gpu is None:
        events.clear()
        ncu.main("sdpa", "", "attn b1 h1 q16 d16 fp32", 3)
        assert events == ["start", "stop"]


def test_a_cpu_copies_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(profile, "_CPU_MATRIX", 64)
    monkeypatch.setattr(profile, "_SAMPLE_NS", 1)
    told: list[str] = []
    rows = list(profile.measure_ceilings("r", Bench(torch.device("cpu"), None), told.append))
    assert [row.name for row in rows] == ["dram copy", "matmul fp32", "matmul bf16"]
    assert told == [f"ceiling: {row.name}" for row in rows]
    assert [(row.work, row.unit) for row in rows[:2]] == [(2 * 2**20, "B/s"), (2 * 64**3, "FLOP/s")]
    assert all(len(row.samples) == profile.SAMPLES and min(row.samples) > 0 for row in rows)
    assert [ROW.validate_json(row.model_dump_json(), strict=True) for row in rows] == rows
