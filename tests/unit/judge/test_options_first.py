"""What is wrong with a command line is said before any run is read, let alone judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Flashmoe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evidence(fabricate: Callable[..., Any], recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records that must not be read."""
    folder = recorded(fabricate().control().timed("fwd_triton", 20_000, "sdpa", 30_000))

    def unread(*_: object) -> None:
        raise AssertionError("the records were read")

    monkeypatch.setattr("flashmoe_science.store.read_runs", unread)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "fwd_triton", "sdpa", "--problem", "attn b1 h1"), "lacks q<n>"),
        (("claims", "nowhere.toml"), "cannot read nowhere.toml"),
    ],
)
def test_a_wrong_option_is_refused_before_the_records_are_read(
    evidence: Path, flashmoe: Flashmoe, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = flashmoe(*arguments, "--evidence", evidence)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--file", "nowhere.json"), "nowhere.json does not exist"),
        (("--accept", "attn b1", "--reason", "because"), "lacks"),
        (("--accept", "all"), "need each other"),
    ],
)
def test_so_is_one_of_the_ratchet(evidence: Path, flashmoe: Flashmoe, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = flashmoe("ratchet", "--runs", evidence, "--file", evidence / "none.json", *arguments)
    assert (code, out) == (2, "")
    assert said in err
