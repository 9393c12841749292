"""The generator of pages and numbers names a stale page and a figure of no run. `make check-docs` holds the pages to it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import flashmoe_science

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("generate")


def test_what_was_edited_is_named_and_written_back(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("README.md", "CHANGELOG.md", "cli.md")}
    for path in files.values():
        path.write_text("one\ntyped\n")
    numbers = generate.Numbers([], [], [], tmp_path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate.Numbers, "read", lambda root: numbers)
    monkeypatch.setattr(generate, "pages", lambda numbers: {files[name]: "one\ntwo\n" for name in ("README.md", "cli.md")})
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--check"])
    assert stopped.value.code == 1
    told = capsys.readouterr().out
    for name in ("README.md", "cli.md"):
        assert f"docs: {name} is stale; run: make docs\n  @@ -2 +2 @@\n  -typed\n  +two\n" in told
    assert files["cli.md"].read_text() == "one\ntyped\n"

    generate.main([])
    assert files["cli.md"].read_text() == files["README.md"].read_text() == "one\ntwo\n"
    generate.main(["--check"])
    assert capsys.readouterr().out.endswith("docs: all generated pages are fresh\n")

    files["CHANGELOG.md"].write_text("Ours takes 987.65 ms.\n")
    for arguments in ([], ["--check"]):
        with pytest.raises(SystemExit) as stopped:
            generate.main(arguments)
        assert stopped.value.code == 1
        assert "docs: CHANGELOG.md:1: 987.65 ms: no run gave this" in capsys.readouterr().out


@pytest.mark.parametrize("name", flashmoe_science.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    told = getattr(flashmoe_science, name).__doc__
    assert told, f"{name} has no docstring"
    assert len(told.strip().splitlines()) > 1, f"{name}'s docstring gives no shapes"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<!-- generated:nonsense -->\n<!-- end generated:nonsense -->", "'nonsense'"),
        ("<!-- generated:losses -->\n", "without its end"),
        ("<!-- end generated:losses -->\n", "without its block"),
    ],
)
def test_a_wrong_mark_is_told(generate: ModuleType, tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        generate.fill(text, generate.Numbers([], [], [], tmp_path))
