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


@pytest.mark.slow
def test_what_was_edited_is_named_and_written_back(tmp_path: Path) -> None:
    """In a copy of what the generator reads and writes: each page, a number typed into the README, a figure of no run's."""
    for name in ("docs", "evidence", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    before = {page: (tmp_path / page).read_text() for page in PAGES}
    for page, text in before.items():
        (tmp_path / page).write_text(text.replace("e", "3", 1))
    readme, mark = tmp_path / "README.md", "<!-- generated:claims -->\n"
    whole = readme.read_text().replace("## Limits\n", "## Limits\n\nOurs takes 987.65 ms.\n", 1)
    readme.write_text(whole.replace(mark, f"{mark}Ours is 1.7x faster.\n"))
    done = generate(tmp_path, "--check")
    assert done.returncode == 1
    for said in (*(f"docs: {page} is stale" for page in (*PAGES, "README.md")), "1.7x", "987.65 ms: no run gave this"):
        assert said in done.stdout
    assert "987.65 ms: no run gave this" in generate(tmp_path).stdout
    assert {page: (tmp_path / page).read_text() for page in PAGES} == before
    assert readme.read_text() == whole


@pytest.mark.parametrize("name", flashmoe_science.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    told = getattr(flashmoe_science, name).__doc__
    assert told, f"{name} has no docstring"
    assert len(told.strip().splitlines()) > 1, f"{name}'s docstring gives no shapes"
