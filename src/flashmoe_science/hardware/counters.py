"""What Nsight Compute counts, by our names: its own differ between versions and chips, so each quantity has alternatives.

Read from the metrics of a ProfileRow, which are in base units. A quantity that none of its names gave is None: not counted is
not the same as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ACTIVE, _ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
_STALL = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio")
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait",
)  # fmt: skip

# The first name found in a report is used. Shares are of a unit's peak: of the cycles in which its SM had work ("active"),
# so that SMs without a block do not dilute a pipe's, or of all cycles ("elapsed") for memory, which all SMs share.
QUANTITIES: dict[str, tuple[str, ...]] = {
    "time_ns": ("gpu__time_duration.sum",),
    "dram": (f"dram__throughput{_ELAPSED}", f"gpu__dram_throughput{_ELAPSED}"),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2": (f"lts__throughput{_ELAPSED}", f"lts__t_sectors{_ELAPSED}"),
    "l2_bytes": ("lts__t_bytes.sum",),
    "tensor": (
        f"sm__pipe_tensor_cycles_active{_ACTIVE}",
        f"sm__pipe_tensor_op_hmma_cycles_active{_ACTIVE}",
        f"sm__inst_executed_pipe_tensor{_ACTIVE}",
    ),
    "fma": (f"sm__pipe_fma_cycles_active{_ACTIVE}", f"sm__inst_executed_pipe_fma{_ACTIVE}"),
    "alu": (f"sm__pipe_alu_cycles_active{_ACTIVE}", f"sm__inst_executed_pipe_alu{_ACTIVE}"),
    "special": (f"sm__inst_executed_pipe_xu{_ACTIVE}",),
    "lsu": (f"sm__inst_executed_pipe_lsu{_ACTIVE}",),
    "shared": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared{_ACTIVE}", f"l1tex__data_pipe_lsu_wavefronts_mem_shared{_ELAPSED}"),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    "load_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
    "store_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",),
    "occupancy": (f"sm__warps_active{_ACTIVE}",),
    "issue": (f"smsp__issue_active{_ACTIVE}", f"sm__inst_issued{_ACTIVE}"),
    "eligible_warps": ("smsp__warps_eligible.avg.per_cycle_active",),
    "threads_per_instruction": ("smsp__thread_inst_executed_per_inst_executed.ratio",),
    "threads_not_predicated_off": ("smsp__thread_inst_executed_pred_on_per_inst_executed.ratio",),
    "local_loads": ("smsp__inst_executed_op_local_ld.sum", "l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum"),
    "local_stores": ("smsp__inst_executed_op_local_st.sum", "l1tex__t_requests_pipe_lsu_mem_local_op_st.sum"),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "bytes_per_sector": ("smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio",),
    "global_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
}

# The launch itself, which the tool knows whether or not it may read counters.
LAUNCH = {
    "registers": "launch__registers_per_thread",
    "shared_static": "launch__shared_mem_per_block_static",
    "shared_dynamic": "launch__shared_mem_per_block_dynamic",
    "cluster_x": "launch__cluster_dim_x",
    "cluster_y": "launch__cluster_dim_y",
    "cluster_z": "launch__cluster_dim_z",
}

METRICS: tuple[str, ...] = tuple(
    dict.fromkeys(
        [name for names in QUANTITIES.values() for name in names]
        + [f"{_STALL[0]}{reason}{_STALL[1]}" for reason in _STALLS]
        + list(LAUNCH.values())
    )
)


@dataclass(frozen=True, slots=True)
class Counters:
    """One launch's metrics. Shares come as 0 to 1, everything else in base units."""

    metrics: Mapping[str, float]

    def __getitem__(self, quantity: str) -> float | None:
        """A quantity of QUANTITIES; None where it was not counted. A negative value means not counted."""
        for name in QUANTITIES[quantity]:
            if (value := self.metrics.get(name, -1.0)) >= 0:
                return value / 100 if name.endswith((_ACTIVE, _ELAPSED)) else value
        return None

    def total(self, *quantities: str) -> float | None:
        """The sum of quantities; None where one was not counted."""
        values = [self[quantity] for quantity in quantities]
        return None if None in values else sum(value for value in values if value is not None)

    def stalls(self) -> dict[str, float]:
        """Reason -> share of the cycles that warps waited for it, the longest first. Being issued is not waiting."""
        first, last = _STALL
        waits = {
            name.removeprefix(first).removesuffix(last): value
            for name, value in self.metrics.items()
            if name.startswith(first) and name.endswith(last)
        }
        waits.pop("selected", None)
        together = sum(waits.values())
        if together <= 0:
            return {}
        return dict(sorted(((reason, value / together) for reason, value in waits.items()), key=lambda item: -item[1]))
