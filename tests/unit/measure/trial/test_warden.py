"""A child of the harness's own, at the other end of the line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from flashmoe_science.measure.trial.parties import REFEREE
from flashmoe_science.measure.trial.warden import Failed, Ward


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_child_is_the_first_to_go_where_memory_runs_out_and_ends_when_it_is_closed() -> None:
    with Ward(REFEREE) as ward:
        assert ward.ask("open", contract="attention") == {}
        with pytest.raises(Failed, match="contract is 'nothing'; it must be"):
            ward.ask("open", contract="nothing")
        assert Path(f"/proc/{ward.pid}/oom_score_adj").read_text().strip() == "1000"
        assert ward.asked_ns >= ward.last_wall_ns > 0
        pid = ward.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not ward.alive
