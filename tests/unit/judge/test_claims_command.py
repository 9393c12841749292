"""``flashmoe claims``: outcomes and exit codes that a script can rely on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

CLAIM = """
[[claim]]
id = "{id}"
text = "quick enough"
gpu = "{gpu}"
clock = "graph"
problems = 1
statistic = "min"
at_least = {at_least}
"""
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evidence(recorded: Callable[..., Path], fabricate: Callable[..., Any]) -> Path:
    """fwd_triton is 1.5 times as fast as fa3."""
    return recorded(fabricate().control().timed("fwd_triton", 20_000, "fa3", 30_000))


def claims(path: Path, *entries: Sequence[object]) -> Path:
    text = "".join(CLAIM.format(id=name, gpu=gpu, at_least=at_least) for name, gpu, at_least in entries)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("entries", "code", "outcomes"),
    [
        ([("a", "h200", 1.4)], 0, ["holds"]),
        ([("a", "h200", 1.4), ("b", "h200", 1.7)], 1, ["holds", "fails"]),
        ([("a", "h200", 1.4), ("b", "b200", 1.4)], 3, ["holds", "no record"]),
        ([("a", "b200", 1.4), ("b", "h200", 1.7)], 1, ["no record", "fails"]),
    ],
)
def test_the_exit_code_says_whether_all_hold(
    flashmoe: Call, evidence: Path, entries: list[tuple[str, str, float]], code: int, outcomes: list[str]
) -> None:
    claims(evidence / "claims.toml", *entries)
    got, out, _ = flashmoe("claims", "--evidence", evidence, "--json")
    assert got == code
    assert [one["outcome"] for one in json.loads(out)["claims"]] == outcomes


def test_a_failed_claim_says_by_how_much_with_interval_worst_problem_and_runs(flashmoe: Call, evidence: Path) -> None:
    path = claims(evidence / "mine.toml", ("too-much", "h200", 1.7))
    code, out, _ = flashmoe("claims", path, "--evidence", evidence)
    assert code == 1
    said = " ".join(out.split())
    assert "too-much: quick enough min >= 1.7x" in said
    assert "fastest of ours against best peer; every suite on h200, graph clock, cold cache, 1 problem" in said
    assert "worst is attn b2 h8 q512 d64 fp16; runs r1" in said
    assert "the near end of its interval, misses 1.7 by a factor of 1." in said
    assert "(the records show the contrary)" in said
    assert "1 claim: 0 hold, 1 fail, 0 have no record" in out


@pytest.mark.parametrize("start", ["\ufeff", ""])
def test_a_file_from_another_editor_is_read(flashmoe: Call, evidence: Path, start: str) -> None:
    path = claims(evidence / "mine.toml", ("a", "h200", 1.4))
    path.write_text(start + path.read_text().replace("\n", "\r\n"), newline="", encoding="utf-8")
    assert flashmoe("claims", path, "--evidence", evidence)[0] == 0


def test_a_claims_text_can_neither_command_the_terminal_nor_pass_for_another_line(flashmoe: Call, evidence: Path) -> None:
    path = claims(evidence / "mine.toml", ("a", "h200", 1.4))
    path.write_text(path.read_text().replace("quick enough", "quick\\u001b[2J\\nholds  b: forged"))
    _, out, _ = flashmoe("claims", path, "--evidence", evidence)
    assert "\x1b" not in out
    assert "a: quick\\x1b[2J holds b: forged" in out
