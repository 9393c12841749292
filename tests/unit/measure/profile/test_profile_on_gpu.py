"""Ceilings, launches, clocks and counters of a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe_science.judge.diagnose.diagnosis import diagnose
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.profile.ncu import find_tool
from flashmoe_science.measure.profile.profile import measure_ceilings, run_profile, subject
from flashmoe_science.measure.request import Request
from flashmoe_science.measure.session import Session
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CallPathRow, CeilingRow, ProfileRow, RefusalRow, Row, TimingRow
from flashmoe_science.store import RunWriter, read_run

pytestmark = pytest.mark.gpu

PROBLEM = "attn b1 h4 q512 d64 fp16"


def test_ceilings_are_near_what_the_chip_is_specified_for() -> None:
    bench = bench_here()
    assert bench.gpu is not None
    rows = {row.name: row for row in measure_ceilings("r", bench, lambda text: None)}
    assert rows.keys() == {"dram copy", "dram read", "tensor bf16", "tensor fp16"}
    # Below, the kernel does not fill its pipe; above, it does not do what it says.
    for name, peak, least in (
        ("dram read", bench.gpu.memory_bandwidth, 0.6),
        ("dram copy", bench.gpu.memory_bandwidth, 0.6),
        ("tensor bf16", bench.gpu.tensor_flops_16bit, 0.4),
        ("tensor fp16", bench.gpu.tensor_flops_16bit, 0.4),
    ):
        assert least < rows[name].value / peak < 1.1, f"{name}: {rows[name].value:.3g} of {peak:.3g}"


def profiled(who: str, folder: Path) -> list[Row]:
    bench = bench_here()
    with RunWriter(folder / "run.jsonl") as writer:
        session = Session(bench, writer, Request(quick=True), lambda *step: None)
        run_profile(session, [subject(who, parse_problem(PROBLEM), bench)], folder)
    rows = list(read_run(folder / "run.jsonl").rows)
    assert [row.reason for row in rows if isinstance(row, RefusalRow)] == []
    return rows


@pytest.mark.parametrize("who", ["fwd_triton", "sdpa"])
def test_a_profile_has_launches_clocks_and_counters_or_why_not(who: str, tmp_path: Path) -> None:
    rows = profiled(who, tmp_path)
    (path,) = (row for row in rows if isinstance(row, CallPathRow))
    assert (bool(path.launches), path.broken_promises) == (True, [])
    assert [row.clock for row in rows if isinstance(row, TimingRow)] == ["graph", "eager"]
    counted = [row for row in rows if isinstance(row, ProfileRow)]
    if find_tool() is None or "ERR_NVGPUCTRPERM" in (counted[0].absent or ""):
        assert counted[0].absent
        pytest.skip(counted[0].absent)
    assert counted[0].absent is None, counted[0].absent
    kernels = {launch.name for launch in path.launches if launch.grid != (0, 0, 0)}  # a memset has no grid, and no counters
    assert {row.launch.name for row in counted if row.launch} == kernels
    found = diagnose([read_run(tmp_path / "run.jsonl")], PROBLEM, who)
    untested = {one.key for one in found.hypotheses if one.status == "untested"}
    assert untested <= {"rival-floor"}, untested
    status = {one.key: one.status for one in found.hypotheses}
    assert status["no-tensor-cores"] == "ruled out"
    assert status["small-grid"] == "supported"
    assert [row for row in rows if isinstance(row, CeilingRow)]
    assert list(tmp_path.glob("*.ncu-rep"))
