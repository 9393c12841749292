"""From words to functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashmoe_science.measure.worker.loading import file_of, load, parse_spec


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_a_file_and_a_module_and_a_method_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("SEVEN = 7\n")
    (tmp_path / "time.py").write_text("from beside import SEVEN\nclass A:\n    @staticmethod\n    def fn(): return SEVEN\n")
    assert load(f"{tmp_path}/time.py:A.fn")() == 7
    assert not hasattr(sys.modules["time"], "A")  # the file stands in for nothing
    (tmp_path / "plain.py").write_text("def fn(): return 8\n")
    assert load("plain:fn")() == 8


def test_what_is_no_function_is_refused_and_a_misspelt_name_told_with_the_one_that_is_near(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("SEVEN = 7\ndef attention(): ...\n")
    with pytest.raises(TypeError, match=r"mine\.py:SEVEN is a int, which cannot be called"):
        load("mine.py:SEVEN")
    with pytest.raises(AttributeError, match=r"mine\.py has no attentoin; did you mean attention\?"):
        load("mine.py:attentoin")


def test_a_file_that_imports_from_its_package_is_told_to_be_named_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "side.py").write_text("SEVEN = 7\n")
    (tmp_path / "pack" / "kernel.py").write_text("from .side import SEVEN\ndef fn(): return SEVEN\n")
    with pytest.raises(ImportError, match=r"name it as a module of its package, as in package\.kernel:fn"):
        load("pack/kernel.py:fn")
    assert load("pack.kernel:fn")() == 7


def test_the_file_of_a_function_is_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/kernel.py", "alone.py"):
        (tmp_path / name).write_text("raise SystemExit\n")
    assert file_of(parse_spec("mine.kernel:fn")) == tmp_path / "mine" / "kernel.py"
    assert file_of(parse_spec("alone:fn")) == tmp_path / "alone.py"
    assert file_of(parse_spec("mine.nowhere:fn")) is None
    assert "mine" not in sys.modules
