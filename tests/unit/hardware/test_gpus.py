"""The GPU table: numbers that must agree with each other, names as people write them, cards that it does not list."""

from __future__ import annotations

import pytest

from flashmoe_science.hardware.gpus import GPUS, KIB, MIB, Gpu, gpu_for_device, gpu_named

# 16-bit tensor FLOP per SM and clock with fp32 accumulation, from the whitepapers' tables of units.
TENSOR_RATE = {"a100": 2048, "a10": 1024, "l4": 1024, "l40s": 1024, "h100": 4096, "h200": 4096, "b200": 8192}
GEFORCE_RATE = {"rtx3090": 512, "rtx4090": 512, "rtx5090": 512}
NO_4BIT = ("h100", "h200")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_peak_rates_follow_from_units_and_clock(gpu: Gpu) -> None:
    """A dense peak that is really the sparse one, or another card's, is off by a factor; clocks differ by 8% at most."""
    rate = (TENSOR_RATE | GEFORCE_RATE)[gpu.name]
    assert gpu.tensor_flops_16bit / (gpu.sm_count * rate * gpu.boost_clock_hz) == pytest.approx(1, abs=0.08)
    wide = gpu.tensor_flops_16bit * (2 if gpu.name in GEFORCE_RATE else 1)  # fp16 sums, on a GeForce card
    assert gpu.tensor_flops_8bit / wide == pytest.approx(2, rel=0.02)
    assert gpu.tensor_flops_4bit == gpu.tensor_flops_8bit * (1 if gpu.name in NO_4BIT else 2)
    lanes = 64 if gpu.compute_capability == (8, 0) else 128
    assert gpu.fp32_flops / (2 * lanes * gpu.sm_count * gpu.boost_clock_hz) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("L4", "l4"),
        ("NVIDIA L4", "l4"),
        ("nvidia h200 tensor core gpu", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-SXM4-80GB", "a100"),
        ("a100 80 gb", "a100"),
        ("H100 SXM5", "h100"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ],
)
def test_names_as_people_write_them(text: str, name: str) -> None:
    assert gpu_named(text) is GPUS[name]


@pytest.mark.parametrize("text", ["", "v100", "A100-PCIE-40GB", "A100-SXM-40GB", "H100 PCIe", "L", "l4x"])
def test_unknown_names_list_the_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpu is .*; it must be one of .*\bl4\b.*\bh200\b") as caught:
        gpu_named(text)
    assert "\n" not in str(caught.value)


def test_a_slice_of_a_listed_card_is_not_the_whole_card() -> None:
    """A cut-down card or a MIG instance has the product's name but fewer SMs."""
    found = gpu_for_device("NVIDIA H200", (9, 0), 16, memory_bytes=18 * 1024 * MIB, l2_bytes=7 * MIB)
    assert (found.name, found.sm_count, found.memory_bytes) == ("h200-16sm", 16, 18 * 1024 * MIB)
    assert found.tensor_flops_16bit < GPUS["h200"].tensor_flops_16bit / 7


def test_an_unlisted_card_is_built_from_its_report() -> None:
    found = gpu_for_device(
        "NVIDIA A100-PCIE-40GB",
        (8, 0),
        108,
        memory_bytes=40_960 * MIB,
        l2_bytes=40 * MIB,
        boost_clock_hz=1.41e9,
        memory_bandwidth=1.555e12,
    )
    assert found.name == "a100-pcie-40gb"
    assert (found.shared_per_block, found.max_blocks_per_sm, found.memory_bandwidth) == (163 * KIB, 32, 1.555e12)
    assert found.tensor_flops_16bit == pytest.approx(312e12, rel=0.01)
    assert found.tensor_flops_8bit == pytest.approx(624e12, rel=0.01)
    assert found.tensor_flops_4bit == pytest.approx(1248e12, rel=0.01)


def test_a_capability_that_is_not_known_takes_an_older_ones_limits_and_its_own_report() -> None:
    found = gpu_for_device(
        "NVIDIA Z1", (13, 0), 200, memory_bytes=1, l2_bytes=1, shared_per_sm=300 * KIB, shared_per_block=299 * KIB
    )
    assert (found.compute_capability, found.shared_per_block, found.max_blocks_per_sm) == ((13, 0), 299 * KIB, 24)
    assert found.memory_bandwidth == max(gpu.memory_bandwidth for gpu in GPUS.values())
