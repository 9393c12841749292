"""tools/end_to_end.py on the CPU with a decoder of two small layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "end_to_end.py"


def test_it_times_each_attention_and_holds_its_logits_to_sdpas(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--size", "tiny", "--context", "40", "--batches", "1", "3", "--samples", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    rows = record["rows"]
    assert {(row["work"], row["batch"]) for row in rows} == {("prefill", 1), ("decode", 1), ("decode", 3)}
    assert {row["attention"] for row in rows} == {"fms", "sdpa", "sdpa-grouped"}
    assert all(row["failed"] is None and row["tokens_per_second"] > 0 and row["error"] < 1e-5 for row in rows)
    assert record["absent"] == {"fa3": "it needs a GPU"}
    assert "fa3 was not run" in done.stdout
