"""What a fit says where it can say little: nothing was built, no grid is known, no block fits."""

from __future__ import annotations

import pytest

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


def test_waves_use_the_resident_blocks() -> None:
    found = fit_build(given_block(L4, shared_bytes=40 * KIB, threads=128, registers=64), L4, grid_blocks=58 * 3)
    assert found.residency is not None
    assert found.waves is not None
    assert (found.residency.blocks, found.waves.count) == (2, 1.5)


@pytest.mark.parametrize(
    ("name", "said"), [("shared_bytes", "shared memory"), ("threads", "threads"), ("registers", "registers")]
)
def test_impossible_numbers_are_refused(name: str, said: str) -> None:
    block = {"shared_bytes": 0, "threads": 128, "registers": 64} | {name: -1}
    with pytest.raises(ValueError, match=f"{said} is -1"):
        given_block(L4, **block)
