"""Resident blocks against published examples and values derived by hand from the allocation rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.hardware.fitting import fit_build
from flashmoe_science.hardware.gpus import GPUS, KIB
from flashmoe_science.hardware.occupancy import block_refusal, residency, waves
from flashmoe_science.hardware.target import Build

gpus = st.sampled_from(list(GPUS.values()))


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared_kb", "blocks", "limited_by"),
    [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy".
        ("a100", 128, 37, 0, 12, ("registers",)),
        ("a100", 320, 37, 0, 4, ("registers",)),
        # The whole opt-in maximum leaves room for one block; half of an SM's, less the reserved 1 KB, for two.
        ("h200", 128, 32, 227, 1, ("shared memory",)),
        ("h200", 128, 32, 113, 2, ("shared memory",)),
        ("h200", 128, 32, 113.5, 1, ("shared memory",)),
        ("l4", 256, 64, 56.75, 1, ("shared memory",)),
        # 168 registers x 32 = 5,376 a warp: 3 warps in a subpartition's 16,384, 12 warps an SM.
        ("h200", 384, 168, 64, 1, ("registers",)),
        # 255 x 32 = 8,160, allocated as 8,192: 8 warps an SM.
        ("a100", 128, 255, 0, 2, ("registers",)),
        # 129 registers are allocated as 136 = 4,352 a warp: 12 warps, where 128 would allow 16.
        ("a100", 128, 129, 0, 3, ("registers",)),
        ("a100", 1024, 32, 0, 2, ("registers", "threads")),
        # One warp a block: the limit on blocks, which differs between 8.0, 8.6 and 8.9.
        ("a100", 32, 32, 0, 32, ("blocks",)),
        ("a10", 32, 32, 0, 16, ("blocks",)),
        ("l4", 32, 32, 0, 24, ("blocks",)),
    ],
)
def test_resident_blocks(
    gpu: str, threads: int, registers: int, shared_kb: float, blocks: int, limited_by: tuple[str, ...]
) -> None:
    found = residency(GPUS[gpu], threads=threads, registers=registers, shared_bytes=int(shared_kb * KIB))
    assert (found.blocks, found.limited_by) == (blocks, limited_by)
    assert found.warps == blocks * threads // 32


@given(gpus, st.integers(1, 1024), st.integers(1, 255), st.integers(0, 232_448))
def test_residents_respect_every_resource(gpu, threads, registers, shared_bytes) -> None:  # type: ignore[no-untyped-def]
    found = residency(gpu, threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert found.blocks * registers * threads <= gpu.registers_per_sm
    assert found.blocks * (shared_bytes + KIB) <= gpu.shared_per_sm or found.blocks == 0
    assert found.warps * 32 <= gpu.max_threads_per_sm
    assert found.blocks <= gpu.max_blocks_per_sm
    assert (found.blocks == 0) == (
        block_refusal(gpu, threads=threads, registers=registers, shared_bytes=shared_bytes) is not None
    )


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ((128, 64, 160 * KIB), "160 KB: above the 99 KB that a block may ask for on NVIDIA L4"),
        ((1056, 32, 0), "1056 threads in a block; the most is 1024"),
        ((128, 256, 0), "256 registers a thread; the most is 255"),
        ((1024, 65, 0), "65 registers x 1024 threads do not fit the 65536 registers of an SM"),
    ],
)
def test_what_cannot_be_launched_says_why(block: tuple[int, int, int], reason: str) -> None:
    threads, registers, shared_bytes = block
    found = block_refusal(GPUS["l4"], threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("grid", "resident", "last_fill", "efficiency"),
    [(132, 1, 1.0, 1.0), (133, 1, 1 / 132, 133 / 264), (264, 2, 1.0, 1.0), (396, 2, 0.5, 0.75)],
)
def test_waves(grid: int, resident: int, last_fill: float, efficiency: float) -> None:
    found = waves(GPUS["h200"], grid, resident)
    assert found.idle_sms == 0
    assert (found.last_fill, found.efficiency) == pytest.approx((last_fill, efficiency))


def test_a_build_that_spills_fits_with_a_warning_and_one_that_failed_has_no_numbers() -> None:
    spilled = fit_build(Build("l4", "k", registers=255, spill_bytes=16, threads=128), GPUS["l4"])
    assert (spilled.as_dict()["fits"], spilled.warning) == (True, "spills 16 bytes a thread")
    failed = fit_build(Build("l4", "k", refusal="too big"), GPUS["l4"], grid_blocks=8).as_dict()
    assert (failed["fits"], failed["registers"], failed["blocks_per_sm"], failed["waves"]) == (False, None, None, None)
