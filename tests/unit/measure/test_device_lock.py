"""One run at a time on a GPU; a CPU is shared."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.measure import device_lock as module
from flashmoe_science.measure.device_lock import DeviceBusy, alone_on

# What another run does, without the seconds that PyTorch takes to load.
HOLD = """
import sys
from flashmoe_science.locks import hold
file = open(sys.argv[1], "w")
assert hold(file)
print("holding", flush=True)
sys.stdin.read()
"""
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    return tmp_path


@pytest.fixture
def other(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has its turn on the GPU."""
    command = [sys.executable, "-c", HOLD, str(place / "flashmoe-GPU-1.lock")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as one:
        assert one.stdout.readline() == "holding\n"
        yield one
        one.kill()


def test_a_second_run_waits_with_a_message_and_is_then_refused(
    other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.1)
    said: list[str] = []
    with pytest.raises(DeviceBusy, match="another flashmoe run is timing on this GPU; wait"), alone_on(GPU, said.append):
        pass
    assert set(said) == {"waiting for another flashmoe run on this GPU"}


def test_a_second_run_begins_when_the_first_ends_however_it_ends(other: subprocess.Popen[str]) -> None:
    with alone_on(GPU, lambda text: other.kill()):
        pass


def test_a_cpu_is_shared_without_waiting(other: subprocess.Popen[str]) -> None:
    with alone_on(torch.device("cpu"), pytest.fail), alone_on(torch.device("cpu"), pytest.fail):
        pass


def test_where_no_lock_can_be_made_the_run_goes_on(place: Path) -> None:
    (place / "precious").write_text("mine")
    (place / "flashmoe-GPU-1.lock").symlink_to(place / "precious")  # a link in the temporary folder is not followed
    with alone_on(GPU, pytest.fail):
        pass
    assert (place / "precious").read_text() == "mine"
