"""Planted runs: launches, counters, times and ceilings that a test chooses, on a GPU of its choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from tests.unit.fabricated import Fabricate

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
from flashmoe_science.judge.diagnose.hypothesis import Hypothesis
from flashmoe_science.records import CallPathRow, CeilingName, CeilingRow, CeilingUnit, Clock, ProfileRow, SeenLaunch, TimingRow

# A launch whose every counter is unremarkable: half of everything in use, nothing wasted.
QUIET = {
    "gpu__time_duration.sum": 100_000.0,
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": 20.0,
    "dram__bytes_read.sum": 3.2e6,
    "dram__bytes_write.sum": 1.0e6,
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": 30.0,
    "lts__t_bytes.sum": 20e6,
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 50.0,
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": 20.0,
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": 25.0,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active": 40.0,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 1e6,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 1e3,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": 0.0,
    "smsp__issue_active.avg.pct_of_peak_sustained_active": 65.0,
    "smsp__thread_inst_executed_per_inst_executed.ratio": 31.5,
    "smsp__inst_executed_op_local_ld.sum": 0.0,
    "smsp__inst_executed_op_local_st.sum": 0.0,
    "smsp__inst_executed.sum": 1e7,
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio": 31.0,
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 5e5,
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 1.0,
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": 0.1,
}


class Plant(Fabricate):
    """A run in the making; each method adds rows and returns it."""

    def __init__(
        self, gpu: str | None = "h200", run: str = "r1", started: str = "2026-01-01T00:00:00+00:00", digest: str = "0"
    ) -> None:
        super().__init__(run, started, suite="custom", gpu=GPUS[gpu].product if gpu else None)
        self.header = self.header.model_copy(update={"source_digest": digest})

    def launch(
        self, problem: str, kernel: str, grid: tuple[int, int, int], threads: int, shared_bytes: int = 0,
        registers: int | None = 64, config: str = "",
    ) -> Self:  # fmt: skip
        seen = SeenLaunch(name=kernel, grid=grid, block=(threads, 1, 1), shared_bytes=shared_bytes, registers=registers)
        self.rows.append(
            CallPathRow(run=self.name, problem=problem, kernel=kernel, config=config, launches=[seen], broken_promises=[])
        )
        return self

    def time(
        self, problem: str, kernel: str, microseconds: float, clock: Clock = "graph", rival: str | None = None,
        rival_microseconds: float | None = None, config: str = "",
    ) -> Self:  # fmt: skip
        """Six equal samples; without a rival, against itself."""
        own = [round(microseconds * 1e3)] * 6
        other = own if rival_microseconds is None else [round(rival_microseconds * 1e3)] * 6
        self.rows.append(
            TimingRow(
                run=self.name, problem=problem, op="attention", kernel=kernel, origin="candidate", config=config,
                rival=rival or kernel, rival_origin="peer" if rival else "candidate", rival_config="" if rival else config,
                clock=clock, cache="cold", calls=10, input_sets=2, a=own, b=other,
            )
        )  # fmt: skip
        return self

    def profile(
        self, problem: str, kernel: str, metrics: Mapping[str, float] | None = None, absent: str | None = None,
        grid: tuple[int, int, int] = (1024, 1, 1), threads: int = 128, config: str = "",
    ) -> Self:  # fmt: skip
        """QUIET counters with ``metrics`` in their place; none with ``absent``."""
        counted = {} if absent else QUIET | dict(metrics or {})
        self.rows.append(
            ProfileRow(
                run=self.name, problem=problem, kernel=kernel, config=config,
                launch=SeenLaunch(name=kernel, grid=grid, block=(threads, 1, 1), shared_bytes=0, registers=64),
                time_ns=counted.get("gpu__time_duration.sum"), metrics=counted, tool="ncu 2025.3.1", absent=absent,
            )
        )  # fmt: skip
        return self

    def ceiling(self, name: CeilingName, value: float, unit: CeilingUnit) -> Self:
        """A machine that does so many units a second."""
        self.rows.append(CeilingRow(run=self.name, name=name, unit=unit, work=round(value), samples=[10**9] * 3, how="planted"))
        return self


def causes(found: Diagnosis) -> dict[str, Hypothesis]:
    """Its hypotheses by their keys."""
    return {one.key: one for one in found.hypotheses}


def supported(found: Diagnosis) -> set[str]:
    return {one.key for one in found.hypotheses if one.status == "supported"}


def stalls(**reasons: float) -> dict[str, float]:
    """Metrics of warps that wait for these reasons, in warps an issue."""
    return {f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": value for reason, value in reasons.items()}
