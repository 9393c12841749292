"""What a page links to, and what a source file names under docs/, is there."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"\bdocs/[\w/-]+\.md\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_to_files(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_source_names_pages() -> None:
    sources = chain.from_iterable((ROOT / folder).rglob("*.py") for folder in ("src", "tests", "tools"))
    named = {(path, name) for path in sources for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
