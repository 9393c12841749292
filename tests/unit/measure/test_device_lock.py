"""One run at a time on a GPU; on a CPU, and where it was asked for, side by side, which is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashmoe_science.measure import device_lock as module
from flashmoe_science.measure.device_lock import DeviceBusy, turn

# What another run's ``turn`` does, without the seconds that PyTorch takes to load.
HOLD = """
import os, sys
from flashmoe_science.locks import hold
file = open(f"{sys.argv[2]}/flashmoe-{sys.argv[1]}.lock", "w")
assert hold(file)
print(os.getpid(), file=file, end="", flush=True)
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has its turn on "GPU-1" and on nothing else."""
    with subprocess.Popen([sys.executable, "-c", HOLD, "GPU-1", str(tmp_path)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()


def test_a_second_run_waits_with_a_message_and_is_then_refused(other: subprocess.Popen[str], tmp_path: Path) -> None:
    said: list[str] = []
    busy = rf"another flashmoe run \(pid {other.pid}\) is timing on this GPU; wait until it ends, or pass --share"
    with pytest.raises(DeviceBusy, match=busy), turn("GPU-1", False, said.append, wait_s=0.1, folder=tmp_path):
        pass
    assert said
    assert set(said) == {f"waiting for another flashmoe run (pid {other.pid}) on this GPU"}


def test_a_second_run_begins_when_the_first_ends_however_it_ends(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    with turn("GPU-1", False, lambda text: other.kill(), folder=tmp_path) as beside:
        assert beside is None
        assert (tmp_path / "flashmoe-GPU-1.lock").read_text() == str(os.getpid())


def test_to_share_is_said_in_the_record(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with turn("GPU-1", True, pytest.fail, folder=tmp_path) as beside:
        assert beside == f"another flashmoe run (pid {other.pid}) was timing on this GPU at the same time"


def test_a_cpu_is_shared_without_waiting(tmp_path: Path) -> None:
    with turn("cpu", False, pytest.fail, folder=tmp_path) as first, turn("cpu", False, pytest.fail, folder=tmp_path) as second:
        assert first is None
        assert second == f"another flashmoe run (pid {os.getpid()}) was timing on this CPU at the same time"


def test_a_link_in_the_temporary_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "flashmoe-GPU-1.lock").symlink_to(tmp_path / "precious")
    with turn("GPU-1", False, pytest.fail, folder=tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
