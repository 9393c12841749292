"""tools/end_to_end.py on the CPU with decoders of two small layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.forked import program

TOOL = Path(__file__).parents[3] / "tools" / "end_to_end.py"


def record_of(size: str, folder: Path) -> tuple[dict[str, Any], str]:
    out = folder / "record.json"
    options = ["--size", size, "--context", "40", "--batches", "1", "3", "--samples", "2", "--out", str(out)]
    printed = program(TOOL, *options)
    return json.loads(out.read_text(encoding="utf-8")), printed


@pytest.mark.parametrize(
    ("size", "names"),
    [
        ("tiny", {"fms", "sdpa", "sdpa-grouped"}),
        ("tiny-moe", {"fms", "fms-experts", "grouped_mm", "batched_mm"}),
        ("tiny-fp8", {"fms", "fms-w8a8", "fms-dense", "grouped_mm", "pytorch"}),
        ("tiny-mxfp4", {"fms", "fms-dense", "grouped_mm"}),
    ],
)
def test_it_times_each_way_and_holds_its_logits_to_the_firsts(size: str, names: set[str], tmp_path: Path) -> None:
    record, printed = record_of(size, tmp_path)
    rows = record["rows"]
    assert {(row["work"], row["batch"]) for row in rows} == {("prefill", 1), ("decode", 1), ("decode", 3)}
    assert {row["way"] for row in rows} == names
    assert all(row["failed"] is None and row["tokens_per_second"] > 0 for row in rows)
    of_w8a8 = [row["error"] for row in rows if row["way"] == "fms-w8a8"]
    assert all(1e-3 < error < 0.1 for error in of_w8a8)
    assert all(row["error"] < 1e-5 for row in rows if row["way"] != "fms-w8a8")
    absent = {"tiny": {"fa3": "it needs a GPU"}, "tiny-mxfp4": {"pytorch": "it needs a GPU"}}.get(size, {})
    assert record["absent"] == absent
    assert [line.partition(" was not run")[0] for line in printed.splitlines() if "was not run" in line] == [*absent]
    assert all(one > 0 for one in record["first_token_seconds"].values())
    held = {row["way"]: row["weight_bytes"] for row in rows}
    assert "fms-dense" not in held or held["fms"] < held["fms-dense"] == held["grouped_mm"]
