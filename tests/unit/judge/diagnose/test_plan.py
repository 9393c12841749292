"""What changes can give: Amdahl's law as it is, sums that hold, a roof that no sum passes, and what then came of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.fabricated import Fabricate
from tests.unit.judge.diagnose.planted import Plant, stalls

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, Gained, diagnose, gained
from flashmoe_science.judge.diagnose.hypothesis import Change, amdahl
from flashmoe_science.records import CallPathRow

PROBLEM = "attn b1 h1 q512 d64 fp16"
FULL = "attn b32 h8 q256 d64 fp16"


def test_amdahls_law() -> None:
    assert amdahl(0.2, 8) == pytest.approx(1.212, abs=1e-3)  # not 1 + 0.2 * 7 = 2.4
    assert amdahl(0.2, math.inf) == 1.25
    assert amdahl(1.0, 3) == 3
    assert amdahl(1.0, math.inf) == math.inf


def v1() -> Any:
    counted = {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 0.0,
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": 30.0,
        "smsp__issue_active.avg.pct_of_peak_sustained_active": 50.0,
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 5e5,
        **stalls(short_scoreboard=1.0, wait=1.0),
    }
    return Plant().time(PROBLEM, "v1", 900).profile(PROBLEM, "v1", counted, grid=(8, 1, 1), threads=256)


def changes(found: Diagnosis) -> dict[str, Change]:
    return {one.key: one.change for one in found.plan if one.change is not None}


def test_steps_stand_by_what_they_give_and_add_up() -> None:
    by = changes(diagnose([v1().done()], PROBLEM, "v1"))
    gains = [change.most_gain for change in by.values()]
    assert gains == sorted(gains, reverse=True)
    assert by["small-grid"].most_gain == 16  # 64 rows a block, in fours: no tensor core wants 16 of them
    assert "serial-loop" not in by  # 128 blocks then: the 132 SMs have no room for more
    tensor = by["no-tensor-cores"]
    assert tensor.part == pytest.approx(0.8)
    assert tensor.most_gain == pytest.approx(amdahl(0.8, 989 / 67))
    assert by["bank-conflicts"].most_gain == pytest.approx(amdahl(0.5 * 2 / 2.1, 1 / (1 - 0.5)), rel=0.1)
    together = [change.together for change in by.values()]
    assert together == sorted(together)


def test_no_sum_passes_the_binding_ceiling() -> None:
    # 33.6 MB in 12 us on 4.8 TB/s: 7 us is the least, whatever is done; and 4 of 32 bytes of its loads are used.
    metrics = {
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": 58.0,
        "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio": 4.0,
        "dram__bytes_read.sum": 60e6,
    }
    found = diagnose([Plant().time(FULL, "k", 12.0).profile(FULL, "k", metrics).done()], FULL, "k")
    last = list(changes(found).values())[-1]
    assert last.capped
    assert last.together == pytest.approx(12_000 / found.point.binding.least_ns)  # type: ignore[union-attr]


def test_the_hosts_part_is_a_part_of_another_time() -> None:
    run = Plant().time(FULL, "k", 20.0).time(FULL, "k", 50.0, "eager").launch(FULL, "k", (1024, 1, 1), 128)
    ((key, change),) = changes(diagnose([run.done()], FULL, "k")).items()
    assert (change.clock, key) == ("eager", "host-bound")
    assert change.most_gain == pytest.approx(2.5)
    assert change.together == pytest.approx(2.5)  # the device's ceiling is not the caller's


def measured(run: str, started: str, microseconds: float, blocks: int, digest: str, rival: str = "fa3") -> Any:
    """fwd_triton's full run with so many blocks of an H200's 132 SMs."""
    timed = Fabricate(run, started=started)
    timed.header = timed.header.model_copy(update={"source_digest": digest})
    timed.control().timed("fwd_triton", microseconds * 1e3, rival, 24_000)
    seen = timed.rows
    for index, row in enumerate(seen):
        if isinstance(row, CallPathRow) and row.kernel == "fwd_triton":
            launches = [row.launches[0].model_copy(update={"grid": (blocks, 1, 1)})]
            seen[index] = row.model_copy(update={"launches": launches})
    return timed.done()


BEFORE, AFTER = "2026-01-01T00:00:00+00:00", "2026-03-01T00:00:00+00:00"
FABRICATED = "attn b2 h8 q512 d64 fp16"


def gave(*runs: Any) -> Gained | None:
    return gained(diagnose(runs, FABRICATED, "fwd_triton"), runs)


def test_a_change_whose_cause_is_gone_stands_beside_what_was_gained() -> None:
    found = gave(measured("r1", BEFORE, 20.0, 32, "a"), measured("r2", AFTER, 10.0, 132, "b"))
    assert found is not None
    assert "small-grid" in [one.key for one in found.changes]
    assert (found.before_run, found.run, found.how) == ("r1", "r2", "each beside fa3 in its own run")
    assert found.ratio == pytest.approx(2.0, rel=0.01)
    assert found.low < found.ratio < found.high  # type: ignore[operator]


@pytest.mark.parametrize(
    ("blocks", "digest", "rival", "how"),
    [
        (132, "a", "fa3", None),  # unchanged source is no change
        (32, "b", "fa3", None),  # a cause that is still there was not changed
        (132, "b", "fa4", "times of two runs"),
    ],
)
def test_what_was_not_changed_gave_nothing_and_another_rival_leaves_the_times(
    blocks: int, digest: str, rival: str, how: str | None
) -> None:
    found = gave(measured("r1", BEFORE, 20.0, 32, "a"), measured("r2", AFTER, 10.0, blocks, digest, rival))
    grid = found is not None and "small-grid" in [one.key for one in found.changes]
    assert (found and (found.low, found.how.split(",")[0]) if grid else None) == (how and (None, how))
