"""tools/loss_curve.py on the CPU: the losses of every way are PyTorch's, and fall."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.forked import program

TOOL = Path(__file__).parents[3] / "tools" / "loss_curve.py"


def test_losses_of_every_step_are_pytorchs(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--steps", "40", "--batch", "4", "--length", "24", "--out", str(out)]
    printed = program(TOOL, *options)
    assert "equal bits twice: True" in printed
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["way"] for row in rows] == ["pytorch", "pytorch-fp32", "fms", *2 * ["fms-deterministic"]]
    for row in rows:
        assert row["failed"] is None
        assert len(row["losses"]) == 40
        assert max(abs(one - other) for one, other in zip(row["losses"], rows[0]["losses"], strict=True)) < 1e-3
        assert sum(row["losses"][-10:]) < sum(row["losses"][:10])
