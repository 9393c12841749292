"""The fit of a build on a GPU: whether it can launch, its occupancy, what limits it, and the waves of its grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.occupancy import Residency, Waves, shared_verdict, waves
from flashmoe_science.hardware.target import Build, build_residency, fits, spills


@dataclass(frozen=True, slots=True)
class Fit:
    """``refusal`` is why the build cannot be launched on the GPU, None where it can; ``warning`` is about spills.

    The rest is None where nothing was built; ``waves`` also where the grid is not known or no block fits.
    """

    gpu: Gpu
    build: Build
    grid_blocks: int | None
    refusal: str | None
    warning: str | None
    shared: str | None = None  # against both limits, in words
    residency: Residency | None = None
    waves: Waves | None = None

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON. Memory in bytes."""
        resident, filled, built = self.residency, self.waves, self.build.refusal is None
        return {
            "gpu": self.gpu.name,
            "fits": self.refusal is None,
            "refusal": self.refusal,
            "warning": self.warning,
            "registers": self.build.registers if built else None,
            "spill_bytes": self.build.spill_bytes if built else None,
            "threads": self.build.threads if built else None,
            "shared_bytes": self.build.shared_bytes if built else None,
            "shared_limit_static": self.gpu.shared_per_block_static,
            "shared_limit_opt_in": self.gpu.shared_per_block,
            "shared": self.shared,
            "blocks_per_sm": resident.blocks if resident else None,
            "warps_per_sm": resident.warps if resident else None,
            "occupancy": resident.occupancy if resident else None,
            "limited_by": list(resident.limited_by) if resident else None,
            "limited_by_words": resident.reason if resident else None,
            "grid_blocks": self.grid_blocks,
            "waves": filled.count if filled else None,
            "wave_efficiency": filled.efficiency if filled else None,
            "idle_sms": filled.idle_sms if filled else None,
        }


def fit_build(build: Build, gpu: Gpu, grid_blocks: int | None = None) -> Fit:
    """The fit of ``build`` on ``gpu`` with a grid of ``grid_blocks`` blocks."""
    refusal, warning = fits(build, gpu), spills(build)
    if build.refusal is not None:
        return Fit(gpu, build, grid_blocks, refusal, warning)
    resident = build_residency(build, gpu)
    filled = waves(gpu, grid_blocks, resident.blocks) if grid_blocks is not None and resident.blocks else None
    return Fit(gpu, build, grid_blocks, refusal, warning, shared_verdict(gpu, build.shared_bytes), resident, filled)
