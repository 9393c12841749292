"""Workers and oracles asked in this process and in a child."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from flashmoe_science.kernel import CannotServe
from flashmoe_science.measure.channel import Child, Failed, InProcess, _without_half_characters
from flashmoe_science.measure.oracle import MODULE as ORACLE


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_child_is_the_first_to_go_where_memory_runs_out_and_ends_when_it_is_closed() -> None:
    with closing(Child(ORACLE)) as child:
        assert child.ask("open", contract="attention") == {}
        with pytest.raises(Failed, match="contract is 'nothing'; it must be"):
            child.ask("open", contract="nothing")
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"
        assert child.asked_ns >= child.last_wall_ns > 0
        pid = child.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not child.alive


def test_what_no_file_can_hold_is_left_out_of_an_answer() -> None:
    assert _without_half_characters({"failed": "a\ud800b", "deep": [{"\udcff": 1.5}]}) == {
        "failed": "a?b",
        "deep": [{"?": 1.5}],
    }


def test_what_a_function_of_this_process_raises_is_a_failure_in_words() -> None:
    def fails() -> dict[str, object]:
        raise CannotServe("k is not aligned to 16 bytes")

    channel = InProcess({"fail": fails, "ping": dict})
    assert channel.ask("ping") == {}
    assert channel.last_wall_ns > 0
    with pytest.raises(Failed) as failed:
        channel.ask("fail")
    assert failed.value.cannot_serve == "k is not aligned to 16 bytes"
    assert Failed("RuntimeError: no").cannot_serve is None
