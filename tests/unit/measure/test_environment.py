"""The header of a run tells the source and the machine; its rows, what the machine was like."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashmoe_science.hardware.probe import POWER_CAP, Telemetry
from flashmoe_science.measure import bench as environment


def test_the_digest_follows_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_SOURCE", tmp_path)
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "notes.txt").write_text("not source")
    first = environment.source_digest()
    assert len(first) == 64
    (tmp_path / "notes.txt").write_text("still not")
    assert environment.source_digest() == first
    (tmp_path / "a.py").write_text("2")
    changed = environment.source_digest()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, changed, environment.source_digest()}) == 3


def test_the_commit_of_a_checkout_that_we_are_only_installed_into_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHMOE_COMMIT", raising=False)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "--quiet", "--allow-empty", "-m", "theirs"], check=True)
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").touch()
    monkeypatch.setattr(environment, "_SOURCE", installed)
    assert environment.commit() is None


def test_what_throttled_a_gpu_on_either_side_is_said_and_a_power_cap_apart() -> None:
    before = Telemetry(sm_clock_mhz=1980, temperature_c=40, power_w=300.0, throttle=("thermal slowdown", POWER_CAP))
    after = Telemetry(sm_clock_mhz=1700, temperature_c=60, power_w=690.0, throttle=("hardware brake",))
    assert environment.conditions(before, after) == {
        "sm_clock_mhz": [1980, 1700],
        "temperature_c": 60,
        "power_w": 690.0,
        "throttle": ["hardware brake", "thermal slowdown"],
        "power_capped": True,
    }
