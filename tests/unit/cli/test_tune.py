"""``flashmoe tune``: what runs support is written for dispatch, also of a card that the package does not list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.fabricated import PROBLEM, Fabricate

from flashmoe_science.cli import tune
from flashmoe_science.cli.progress import Screen
from flashmoe_science.dispatch import tuned
from flashmoe_science.hardware.gpus import GPUS, Gpu, gpu_for_device
from flashmoe_science.measure.request import Request
from flashmoe_science.store import RunWriter

Flashmoe = Callable[..., tuple[int, str, str]]
ADA = gpu_for_device("NVIDIA RTX 4000 Ada", (8, 9), 48, memory_bytes=20 << 30, l2_bytes=48 << 20)
CARDS = {"NVIDIA L4": GPUS["l4"], ADA.product: ADA}


@pytest.mark.parametrize(("product", "gpu"), CARDS.items(), ids=["listed", "unlisted"])
def test_the_fastest_config_of_a_run_is_what_dispatch_reads(
    product: str, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("flashmoe_science.measure.promote.first_guess", lambda problem, gpu: "fwd_triton")
    runs = tuned.folder() / "runs"
    config = "block_m=64 block_n=64 num_warps=4 num_stages=3"
    run = Fabricate(gpu=product, sms=gpu.sm_count).control(config=config)
    run.timed("fwd_triton", 20_000, "sdpa", 16_000, config=config)
    other = Fabricate("r2", gpu="NVIDIA H200").control().timed("fwd_triton", 20_000, "sdpa", 24_000)  # of another card
    for one in (run, other):
        with RunWriter(runs / f"{one.name}.jsonl") as writer:
            for row in (one.header, *one.done().rows):
                writer.append(row)
    (entry,) = tune._promoted(runs, gpu)
    assert (entry.gpu, str(entry.problem), entry.kernel, str(entry.config)) == (gpu.name, PROBLEM, "fwd_triton", config)
    assert [(one.kernel, one.ratio) for one in entry.peers] == [("sdpa", pytest.approx(1.25, rel=0.02))]
    assert tuned.read_tuned(tuned.folder() / f"{gpu.name}.json") == (entry,)
    assert tune._before(entry, gpu)[0] in {kernel.name for kernel in tune.operation("attention").kernels()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_refused(flashmoe: Flashmoe) -> None:
    assert flashmoe("tune")[0::2] == (2, "flashmoe: there is no NVIDIA GPU here, and tuning measures on one\n")


def test_a_time_that_is_none_is_refused(flashmoe: Flashmoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.probe, "current_gpu", lambda: GPUS["l4"])
    code, _, said = flashmoe("tune", "--minutes", "0")
    assert (code, "it is 0; it must be from 0.5 to 1440" in said) == (2, True)


def test_each_operation_is_measured_in_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Plan:
        def __init__(self, request: Request) -> None:
            asked.append(request)

        def run(self, folder: Path, watch: Callable[[str], None]) -> list[str]:
            return [str(len(asked))]

    monkeypatch.setattr("flashmoe_science.measure.run.Plan", Plan)
    monkeypatch.setattr(tune.time, "monotonic", lambda: 0.0)
    assert tune._measured(("decode", "moe-qwen3", "long"), 60.0, tmp_path, Screen()) == ["1", "2"]
    assert [(one.targets, one.budget_s, one.against) for one in asked] == [
        (("moe-qwen3",), 30.0, ("grouped_mm",)),
        (("decode", "long"), 60.0, ("sdpa",)),
    ]
