"""tools/attention_steps.py on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.forked import program

TOOL = Path(__file__).parents[3] / "tools" / "attention_steps.py"


def test_it_times_a_step_of_both_as_a_caller_waits(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    printed = program(TOOL, "attnbwd b1 h2 hk1 q24 d16 fp32 causal bshd", "--out", str(out))
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (row["clock"], row["served"].partition(":")[0]) == ("eager", "sdpa")
    assert min(*row["ours"], *row["pytorch"]) > 0
    assert f"eager: geometric mean {row['ratio']:.3f}" in printed
