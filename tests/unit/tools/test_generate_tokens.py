"""tools/generate_tokens.py on the CPU with tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "generate_tokens.py"


@pytest.mark.slow
@pytest.mark.redundant  # of a tool that is run by hand
def test_every_way_is_timed_and_its_logits_are_those_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--size", "tiny", "--prompt", "20", "--new", "6", "--batches", "1", "3", "--samples", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["model"], row["batch"], row["way"]) for row in rows] == [
        *(("llama", batch, way) for batch in (1, 3) for way in ("sdpa", "fms")),
        *(("qwen3-moe", batch, way) for batch in (1, 3) for way in ("sdpa, grouped_mm", "fms attention", "fms")),
    ]
    assert all(row["error"] < 1e-5 and len(row["samples"]) == 2 and row["tokens_per_second"] > 0 for row in rows)
