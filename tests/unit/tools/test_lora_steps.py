"""tools/lora_steps.py on the CPU with two small layers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.forked import program

TOOL = Path(__file__).parents[3] / "tools" / "lora_steps.py"


def test_both_ways_give_the_adapters_the_same_gradients(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ("--size", "tiny-moe", "--layers", "2", "--rank", "4", "--documents", "3", "--between", "5", "40")
    printed = program(TOOL, *options, "--samples", "2", "--out", str(out))
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [row["way"] for row in record["rows"]] == ["sdpa-grouped_mm", "fms"]
    assert all(row["failed"] is None and row["error"] < 1e-5 for row in record["rows"])
    assert all(row["length"] == sum(record["lengths"]) and row["tokens_per_second"] > 0 for row in record["rows"])
    assert len(set(record["lengths"])) == 3
    assert "3 documents of" in printed
