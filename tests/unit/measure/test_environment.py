"""The header of a run tells the source and the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from flashmoe_science.measure import bench as environment
from flashmoe_science.measure.bench import Bench, one_line

CPU = Bench(torch.device("cpu"), None)


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


def test_outside_a_checkout_the_environment_may_say_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_SOURCE", tmp_path)
    monkeypatch.delenv("FLASHMOE_COMMIT", raising=False)
    assert environment.commit() is None
    monkeypatch.setenv("FLASHMOE_COMMIT", "abc123")
    assert environment.commit() == "abc123"


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


def test_the_environment_of_a_cpu() -> None:
    here = environment.environment(CPU)
    assert here.gpu is here.driver is here.cuda is None
    assert here.torch == torch.__version__
    assert here.cpu
    assert here.cpu_count >= 1


def test_one_line_of_an_exception() -> None:
    assert one_line(RuntimeError("\n  CUDA error: bad\nmore")) == "RuntimeError: CUDA error: bad"
    assert one_line(KeyError()) == "KeyError"
