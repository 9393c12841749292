"""tools/train_steps.py on the CPU with two small layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.forked import program

TOOL = Path(__file__).parents[3] / "tools" / "train_steps.py"


@pytest.mark.parametrize(
    ("size", "names", "other"),
    [
        ("tiny", ["sdpa", "fms", "fms-deterministic"], "fa4"),
        ("tiny-moe", ["sdpa-grouped_mm", "fms", "fms-experts"], "fa4-sonicmoe"),
    ],
)
def test_it_times_each_way_and_holds_its_gradients_to_the_firsts(
    size: str, names: list[str], other: str, tmp_path: Path
) -> None:
    out = tmp_path / "record.json"
    options = ["--size", size, "--layers", "2", "--batch", "2", "--length", "24", "9", "--samples", "2", "--out", str(out)]
    printed = program(TOOL, *options)
    record = json.loads(out.read_text(encoding="utf-8"))
    found = [(row["way"], row["batch"], row["length"]) for row in record["rows"]]
    assert found == [(name, 2, length) for length in (24, 9) for name in names]
    assert all(row["failed"] is None and row["tokens_per_second"] > 0 and row["error"] < 1e-5 for row in record["rows"])
    assert record["absent"] == {other: "it needs a GPU"}
    assert f"{other} was not run: it needs a GPU" in printed
