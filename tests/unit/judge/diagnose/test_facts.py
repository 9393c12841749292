"""What is gathered of a kernel: which run, machine, config and launch speak of it."""

from __future__ import annotations

import pytest
from tests.unit.judge.diagnose.planted import Plant, causes

from flashmoe_science.judge.diagnose.diagnosis import diagnose
from flashmoe_science.judge.diagnose.facts import NoRecord, gather
from flashmoe_science.problem import ProblemError

PROBLEM = "attn b1 h1 q256 d64 fp16"


def test_the_fastest_config_of_the_latest_run_is_meant() -> None:
    old = Plant(run="r1").time(PROBLEM, "k", 5.0, config="a=1").done()
    new = Plant(run="r2", started="2026-02-01T00:00:00+00:00")
    new.time(PROBLEM, "k", 9.0, config="a=2").time(PROBLEM, "k", 8.0, config="a=3")
    facts = gather([new.done(), old], PROBLEM, "k")
    assert (facts.config, facts.time_ns, facts.times["graph"].run) == ("a=3", 8000.0, "r2")


def test_blocked_counters_leave_the_launch_and_the_reason() -> None:
    run = Plant().profile(PROBLEM, "k", absent="ERR_NVGPUCTRPERM", grid=(4, 1, 1))
    found = diagnose([run.done()], PROBLEM, "k")
    assert found.facts.counters_absent == "ERR_NVGPUCTRPERM"
    assert causes(found)["small-grid"].status == "supported"
    assert causes(found)["bank-conflicts"].status == "untested"


def test_a_refusal_of_changed_source_is_history() -> None:
    old = Plant(run="a", digest="1").refused("callpath", problem=PROBLEM, kernel="k", reason="it hung").done()
    assert diagnose([old], PROBLEM, "k").cause == "it was refused: callpath: it hung"
    new = Plant(run="b", started="2026-02-01T00:00:00+00:00", digest="2").time(PROBLEM, "k", 8.0).done()
    assert gather([old, new], PROBLEM, "k").refusals == ()


def test_counters_of_another_launch_are_not_this_kernels() -> None:
    """It was changed after it was profiled: a lasting record must not speak for what is timed now."""
    run = Plant().profile(PROBLEM, "k", grid=(8, 1, 1)).launch(PROBLEM, "k", (16, 1, 1), 128)
    facts = gather([run.done()], PROBLEM, "k")
    assert (facts.counters, facts.blocks) == (None, 16)
    assert "run r1 profiled another launch, (8, 1, 1) blocks of (128, 1, 1) threads" in facts.counters_absent
    same = Plant().profile(PROBLEM, "k", grid=(16, 1, 1)).launch(PROBLEM, "k", (16, 1, 1), 128)
    assert gather([same.done()], PROBLEM, "k").counters is not None


def test_one_machine_speaks() -> None:
    l4 = Plant("l4", run="a").time(PROBLEM, "k", 50.0).ceiling("dram copy", 1e11, "B/s").done()
    h200 = Plant("h200", run="b", started="2026-02-01T00:00:00+00:00").time(PROBLEM, "k", 8.0).done()
    assert gather([l4, h200], PROBLEM, "k").machine == "h200"
    assert not gather([l4, h200], PROBLEM, "k").ceilings["dram"].measured
    there = gather([l4, h200], PROBLEM, "k", gpu="l4")
    assert (there.sm_count, there.time_ns, there.ceilings["dram"].value) == (58, 50_000.0, 1e11)


def test_nothing_known_is_one_line_with_what_is_known() -> None:
    run = Plant().time(PROBLEM, "k", 8.0).done()
    with pytest.raises(NoRecord, match=r"no record has kernel 'q' on .*; kernels on record there: k"):
        gather([run], PROBLEM, "q")
    with pytest.raises(NoRecord, match=r"^no record on l4 has kernel 'k' on .*; there are records of both on h200$"):
        gather([run], PROBLEM, "k", gpu="l4")
    with pytest.raises(NoRecord, match=r"kernels on record there: none$"):
        gather([run], "attn b9 h9 q9 d9 fp16", "k")
    with pytest.raises(ProblemError):
        gather([run], "attn b1", "k")
