"""The generator of pages and numbers: what it writes is what it checks, and a stale page is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashmoe_science

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("docs/reference/cli.md", "docs/reference/support.md", "docs/reference/api.md")


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "docs" / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the generator reads and writes. CI has checked that its pages are fresh."""
    folder = tmp_path_factory.mktemp("docs") / "copy"
    for name in ("docs", "evidence", "tools"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def copy(fresh: Path, tmp_path: Path) -> Path:
    shutil.copytree(fresh, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.slow
@pytest.mark.again
def test_what_was_written_is_fresh(copy: Path) -> None:
    done = generate(copy, "--check")
    assert done.returncode == 0, done.stdout
    assert "fresh" in done.stdout


@pytest.mark.slow
def test_edited_pages_are_named_and_written_back(copy: Path) -> None:
    before = {page: (copy / page).read_text() for page in PAGES}
    for page, text in before.items():
        (copy / page).write_text(text.replace("e", "3", 1))
    done = generate(copy, "--check")
    assert done.returncode == 1
    for page in PAGES:
        assert f"docs: {page} is stale" in done.stdout
    assert generate(copy).returncode == 0
    assert {page: (copy / page).read_text() for page in PAGES} == before


@pytest.mark.slow
def test_a_number_typed_into_the_readme_is_caught(copy: Path) -> None:
    readme = copy / "README.md"
    mark = "<!-- generated:claims -->\n"
    readme.write_text(readme.read_text().replace(mark, f"{mark}Ours is 1.7x faster.\n"))
    done = generate(copy, "--check")
    assert done.returncode == 1
    assert "README.md is stale" in done.stdout
    assert "1.7x" in done.stdout


@pytest.mark.slow
def test_a_figure_of_speed_that_no_run_gave_is_caught(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("## Limits\n", "## Limits\n\nOurs takes 987.65 ms.\n", 1))
    done = generate(copy, "--check")
    assert done.returncode == 1
    assert "987.65 ms: no run gave this" in done.stdout


def test_a_wrong_argument_is_told(tmp_path: Path) -> None:
    done = generate(ROOT, "--chekc")
    assert done.returncode == 1
    assert "usage" in done.stderr


@pytest.mark.parametrize("name", flashmoe_science.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    told = getattr(flashmoe_science, name).__doc__
    assert told, f"{name} has no docstring"
    assert len(told.strip().splitlines()) > 1, f"{name}'s docstring gives no shapes"
