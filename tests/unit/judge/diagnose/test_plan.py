"""What changes can give: Amdahl's law as it is, sums that hold, a roof that no sum passes, and what then came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.judge.diagnose.diagnosis import diagnose
from flashmoe_science.judge.diagnose.hypothesis import amdahl
from flashmoe_science.judge.diagnose.plan import plan
from flashmoe_science.judge.diagnose.predictions import Outcome, outcomes, part_shown
from flashmoe_science.records import PredictionRow

Maker = Callable[..., Any]

PROBLEM = "attn b1 h1 q512 d64 fp16"
FULL = "attn b32 h8 q256 d64 fp16"


def test_amdahls_law_and_what_share_a_gain_shows() -> None:
    assert amdahl(0.2, 8) == pytest.approx(1.212, abs=1e-3)  # not 1 + 0.2 * 7 = 2.4
    assert amdahl(0.2, math.inf) == 1.25
    assert amdahl(1.0, 3) == 3
    assert amdahl(1.0, math.inf) == math.inf
    # Their 1.58x, "above the theoretical limit", shows what the share was.
    assert part_shown(1.58, 8) == pytest.approx(0.42, abs=5e-3)
    assert part_shown(2.0, math.inf) == 0.5
    assert part_shown(9.0, 8) is None


@pytest.mark.parametrize(("part", "speedup"), [(-0.1, 2), (1.1, 2), (0.5, 0), (math.nan, 2)])
def test_amdahl_refuses_what_is_no_part_or_no_speedup(part: float, speedup: float) -> None:
    with pytest.raises(ValueError, match="it must be"):
        amdahl(part, speedup)


def v1(plant: Maker, stalls: Maker) -> Any:
    counted = {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 0.0,
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": 30.0,
        "smsp__issue_active.avg.pct_of_peak_sustained_active": 50.0,
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 5e5,
        **stalls(short_scoreboard=1.0, wait=1.0),
    }
    return plant().time(PROBLEM, "v1", 900).profile(PROBLEM, "v1", counted, grid=(8, 1, 1), threads=256)


def test_steps_stand_by_what_they_give_and_add_up(plant: Maker, stalls: Maker) -> None:
    made = plan(diagnose(v1(plant, stalls).done(), PROBLEM, "v1"))
    by = {step.hypothesis: step for step in made.steps}
    assert [step.most_gain for step in made.steps] == sorted((step.most_gain for step in made.steps), reverse=True)
    assert by["small-grid"].most_gain == 16  # 64 rows a block, in fours: no tensor core wants 16 of them
    assert "serial-loop" not in by  # 128 blocks then: the 132 SMs have no room for more
    tensor = by["no-tensor-cores"]
    assert tensor.part == pytest.approx(0.8)
    assert tensor.most_gain == pytest.approx(amdahl(0.8, 989 / 67))
    conflicts = by["bank-conflicts"]
    assert conflicts.most_gain == pytest.approx(amdahl(0.5 * 2 / 2.1, 1 / (1 - 0.5)), rel=0.1)
    assert [step.cumulated for step in made.steps] == sorted(step.cumulated for step in made.steps)


def test_no_sum_passes_the_binding_ceiling(plant: Maker) -> None:
    # 33.6 MB in 12 us on 4.8 TB/s: 7 us is the least, whatever is done; and 4 of 32 bytes of its loads are used.
    metrics = {
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": 58.0,
        "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio": 4.0,
        "dram__bytes_read.sum": 60e6,
    }
    made = plan(diagnose(plant().time(FULL, "k", 12.0).profile(FULL, "k", metrics).done(), FULL, "k"))
    assert made.steps
    last = made.steps[-1]
    assert last.capped
    assert last.cumulated == pytest.approx(12_000 / made.least_ns)
    assert "TB/s" in made.limit


def test_the_hosts_part_is_a_part_of_another_time(plant: Maker) -> None:
    problem = "attn b32 h8 q256 d64 fp16"
    run = plant().time(problem, "k", 20.0).time(problem, "k", 50.0, "eager").launch(problem, "k", (1024, 1, 1), 128)
    (step,) = plan(diagnose(run.done(), problem, "k")).steps
    assert (step.clock, step.hypothesis) == ("eager", "host-bound")
    assert step.most_gain == pytest.approx(2.5)
    assert step.cumulated == pytest.approx(2.5)  # the device's ceiling is not the caller's


def predicted(
    fabricate: Maker,
    most_gain: float = 2.0,
    made: str = "2026-02-01T00:00:00+00:00",
    run: str = "p1",
    made_in: str | None = None,
) -> Any:
    """A prediction of fwd_triton's time on the fabricated problem, from run r1, where it took 20 us beside fa3's 24."""
    written = fabricate(run, started=made, suite="plan")
    written.rows.append(
        PredictionRow(
            run=run, made=made, problem="attn b2 h8 q512 d64 fp16", kernel="fwd_triton", config="", gpu="h200", clock="graph",
            change="split", hypothesis="serial-loop", most_gain=most_gain, cumulated=most_gain, how="x", before_ns=20_000,
            before_run="r1", part=0.6, speedup=6.0, made_in=made_in,
        )
    )  # fmt: skip
    return written.done()


def measured(fabricate: Maker, run: str, started: str, microseconds: float, digest: str = "changed", rival: str = "fa3") -> Any:
    timed = fabricate(run, started=started)
    timed.header = timed.header.model_copy(update={"source_digest": digest})
    return timed.control().timed("fwd_triton", microseconds * 1e3, rival, 24_000).done()


BEFORE = ("r1", "2026-01-01T00:00:00+00:00", 20.0, "before")
AFTER = "2026-03-01T00:00:00+00:00"


def outcome(*runs: Any) -> Outcome:
    (found,) = outcomes(runs)
    return found


@pytest.mark.parametrize(("microseconds", "said", "gain"), [(10.5, "hit", 1.9), (18.0, "missed", 1.11), (5.0, "exceeded", 4.0)])
def test_a_prediction_is_held_against_what_came(fabricate: Maker, microseconds: float, said: str, gain: float) -> None:
    found = outcome(measured(fabricate, *BEFORE), predicted(fabricate), measured(fabricate, "r2", AFTER, microseconds))
    assert (found.said, found.run) == (said, "r2")
    assert found.gain == pytest.approx(gain, rel=0.02)
    assert found.low < found.gain < found.high
    assert found.off_by == pytest.approx(2 / found.gain)
    # Twice as fast is three fifths made six times as fast; four times as fast takes nine tenths.
    assert found.part == (pytest.approx(0.9, rel=0.01) if said == "exceeded" else None)
    assert found.how == "each beside fa3 in its own run"


def test_unchanged_source_is_not_the_change(fabricate: Maker) -> None:
    again = measured(fabricate, "r2", AFTER, 20.0, digest="before")
    assert outcome(measured(fabricate, *BEFORE), predicted(fabricate), again).said == "not measured yet"


def test_another_rival_leaves_the_times_of_two_runs(fabricate: Maker) -> None:
    other = measured(fabricate, "r2", AFTER, 10.0, rival="fa4")
    found = outcome(measured(fabricate, *BEFORE), predicted(fabricate), other)
    assert (found.said, found.low) == ("hit", None)
    assert "times of two runs" in found.how


def test_a_change_may_be_made_in_a_version_of_its_own(fabricate: Maker) -> None:
    version = fabricate("r2", started=AFTER).control("mine.py:v2").timed("mine.py:v2", 10_000, "fa3", 24_000)
    found = outcome(measured(fabricate, *BEFORE), predicted(fabricate, made_in="mine.py:v2"), version.done())
    assert (found.said, found.how) == ("hit", "each beside fa3 in its own run")
    assert found.gain == pytest.approx(2, rel=0.02)
