"""Parts of attention are merged in one launch: no order of the ranks' steps gives another result, and faults are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.interpreter import Interpreter


def test_no_order_of_steps_reads_what_another_call_wrote(interpreted: Interpreter) -> None:
    found = interpreted("parallel/merge_protocol.py")
    assert found["right"] == dict.fromkeys(found["right"], "")
    assert len(found["right"]) == 3
    assert [fault for fault, noticed in found["faulty"].items() if not noticed] == []
    assert len(found["faulty"]) == 10


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.redundant])])
def test_ranks_that_read_each_others_memory_merge_their_parts(ranks: int, tmp_path: Path, interpreted: Interpreter) -> None:
    assert interpreted("parallel/interpreted_ranks.py", "merging_ranks", str(ranks), str(tmp_path / "ranks")) == ranks
