"""Ceilings of a CPU, measured; those of a GPU are in tests/correctness/test_profile_on_gpu.py."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.profile import profile as ceilings
from flashmoe_science.records import ROW


def test_a_cpu_copies_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX", 64)
    monkeypatch.setattr(ceilings, "_SAMPLE_NS", 1)
    told: list[str] = []
    rows = list(ceilings.measure_ceilings("r", Bench(torch.device("cpu"), None), told.append))
    assert [row.name for row in rows] == ["dram copy", "matmul fp32", "matmul bf16"]
    assert told == [f"ceiling: {row.name}" for row in rows]
    assert [(row.work, row.unit) for row in rows[:2]] == [(2 * 2**20, "B/s"), (2 * 64**3, "FLOP/s")]
    assert all(len(row.samples) == ceilings.SAMPLES and min(row.samples) > 0 for row in rows)
    assert [ROW.validate_json(row.model_dump_json(), strict=True) for row in rows] == rows
