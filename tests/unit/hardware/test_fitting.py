"""What a fit says where it can say little: nothing was built, no grid is known, no block fits."""

from __future__ import annotations

from flashmoe_science.hardware.fitting import fit_build, given_block
from flashmoe_science.hardware.gpus import GPUS, KIB
from flashmoe_science.hardware.target import Build

L4 = GPUS["l4"]


def test_what_was_not_built_has_no_numbers() -> None:
    found = fit_build(Build("l4", "k", refusal="the assembler refuses it: too big"), L4, grid_blocks=8)
    assert (found.refusal, found.residency, found.waves, found.shared) == (
        "the assembler refuses it: too big",
        None,
        None,
        None,
    )
    told = found.as_dict()
    assert told["fits"] is False
    assert all(told[name] is None for name in ("registers", "spill_bytes", "threads", "shared_bytes", "blocks_per_sm", "waves"))


def test_a_block_that_does_not_fit_has_no_waves() -> None:
    found = fit_build(given_block(L4, shared_bytes=100 * KIB, threads=128, registers=64), L4, grid_blocks=8)
    assert found.refusal is not None
    assert found.residency is not None
    assert (found.residency.blocks, found.waves) == (0, None)


def test_spills_warn_and_fit() -> None:
    found = fit_build(Build("l4", "k", registers=255, spill_bytes=16, threads=128), L4)
    assert (found.refusal, found.warning, found.waves) == (None, "spills 16 bytes a thread", None)
    assert found.as_dict()["fits"] is True
