"""Each hypothesis both ways, on rows planted for it, and untested where nothing decides."""

from __future__ import annotations

import pytest
from tests.unit.judge.diagnose.planted import Plant, causes, stalls, supported

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, diagnose

FULL = "attn b32 h8 q256 d64 fp16"  # 4.2 MB is not what it moves; 134 MB is
SMALL = "attn b1 h1 q256 d64 fp16"
COUNTED = "attn b2 h8 q512 d64 fp16"  # must move 4.19 MB, as QUIET's counters say that it does


def by_counters(**metrics: float) -> Diagnosis:
    run = Plant().profile(COUNTED, "k", {name.replace("__dot__", "."): value for name, value in metrics.items()})
    return diagnose([run.done()], COUNTED, "k")


PEAK = "__dot__avg__dot__pct_of_peak_sustained_"


@pytest.mark.parametrize(
    ("key", "metrics"),
    [
        ("dram-bound", {f"dram__throughput{PEAK}elapsed": 82.0}),
        ("l2-bound", {f"lts__throughput{PEAK}elapsed": 71.0}),
        ("tensor-bound", {f"sm__pipe_tensor_cycles_active{PEAK}active": 81.0}),
        ("fma-bound", {f"sm__pipe_fma_cycles_active{PEAK}active": 77.0}),
        ("special-bound", {f"sm__inst_executed_pipe_xu{PEAK}active": 66.0}),
        ("shared-bound", {f"l1tex__data_pipe_lsu_wavefronts_mem_shared{PEAK}active": 90.0}),
        ("no-tensor-cores", {f"sm__pipe_tensor_cycles_active{PEAK}active": 0.0}),
        ("bank-conflicts", {"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld__dot__sum": 3e5}),
        ("spills", {"smsp__inst_executed_op_local_ld__dot__sum": 4096.0}),
        ("uncoalesced", {"smsp__sass_average_data_bytes_per_sector_mem_global_op_ld__dot__ratio": 4.0}),
        ("idle-threads", {"smsp__thread_inst_executed_per_inst_executed__dot__ratio": 8.0}),
        ("latency-bound", {f"smsp__issue_active{PEAK}active": 20.0}),
    ],
)
def test_a_counter_decides_both_ways(key: str, metrics: dict[str, float]) -> None:
    quiet, planted = by_counters(), by_counters(**metrics)
    assert causes(quiet)[key].status == "ruled out"
    assert causes(planted)[key].status == "supported"
    assert causes(planted)[key].evidence != causes(quiet)[key].evidence
    others = supported(planted) - {key}
    assert others <= supported(quiet)


@pytest.mark.parametrize(("eager", "status"), [(30.0, "supported"), (11.0, "ruled out")])
def test_the_host_is_the_cause_where_calls_outlast_their_kernels(eager: float, status: str) -> None:
    run = Plant().time(SMALL, "k", 10.0).time(SMALL, "k", eager, "eager").done()
    assert causes(diagnose([run], SMALL, "k"))["host-bound"].status == status


def test_a_metric_that_the_tool_did_not_give_is_never_read_as_zero() -> None:
    """Newer versions rename metrics."""
    run = Plant().profile(COUNTED, "k")
    run.rows[-1] = run.rows[-1].model_copy(update={"metrics": {"gpu__time_duration.sum": 1e5}})
    assert not supported(diagnose([run.done()], COUNTED, "k")) - {"small-grid", "serial-loop"}


def test_idle_threads_are_not_guessed_of_short_or_fast_calls() -> None:
    """16 rows a block for 64 threads are how tensor cores of a small tile are used."""
    run = Plant().launch(SMALL, "k", (16, 1, 1), 64).time(SMALL, "k", 5.0).done()
    assert causes(diagnose([run], SMALL, "k"))["idle-threads"].status == "untested"


def test_warps_that_wait_at_barriers_are_idle_only_without_tensor_cores() -> None:
    waiting = stalls(barrier=8.0, wait=1.0)
    scalar = waiting | {"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 0.0}
    for metrics, status in ((scalar, "supported"), (waiting, "ruled out")):
        run = Plant().profile(COUNTED, "k", metrics, grid=(128, 1, 1), threads=256).done()
        assert causes(diagnose([run], COUNTED, "k"))["idle-threads"].status == status


def test_a_rate_beyond_the_fp32_pipe_proves_tensor_cores() -> None:
    long = "attn b4 h16 q4096 d128 bf16"
    found = diagnose([Plant().launch(long, "k", (2048, 1, 1), 384).time(long, "k", 800.0).done()], long, "k")
    assert causes(found)["no-tensor-cores"].status == "ruled out"
    assert causes(found)["fma-bound"].status == "ruled out"
    assert causes(found)["tensor-bound"].status == "supported"  # 687 TFLOP/s of 989


def test_a_cpu_is_judged_by_its_own_ceilings_and_nothing_of_a_gpu() -> None:
    problem = "attn b1 h4 q256 d64 fp32"
    run = Plant(None).time(problem, "sdpa", 2000.0, "eager")
    bare = diagnose([run.done()], problem, "sdpa")
    assert {one.key for one in bare.hypotheses} == {"dram-bound", "matmul-bound", "latency-bound"}
    assert {one.status for one in bare.hypotheses} == {"untested"}
    run.ceiling("dram copy", 10e9, "B/s").ceiling("matmul fp32", 50e9, "FLOP/s")
    found = diagnose([run.done()], problem, "sdpa")  # 67 MFLOP in 2 ms: 34 GFLOP/s
    assert causes(found)["matmul-bound"].status == "supported"
    assert causes(found)["latency-bound"].status == "ruled out"
    assert causes(found)["dram-bound"].status == "untested"
