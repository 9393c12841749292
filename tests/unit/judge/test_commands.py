"""The commands that show records: what they print, and what a wrong request is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.fabricated import PROBLEM, Fabricate

Flashmoe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evidence(recorded: Callable[..., Path]) -> Path:
    run = Fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    cpu = Fabricate("cpu", gpu=None, suite="cpu").control("sdpa", clock="eager")
    return recorded(run, cpu.timed("sdpa", 2e4, "sdpa_math", 6e4, clock="eager"))


def test_json_holds_the_fields_that_are_promised(evidence: Path, flashmoe: Flashmoe) -> None:
    code, out, _ = flashmoe("verdicts", "--json", "--evidence", evidence)
    rows = json.loads(out)
    assert code == 0
    promised = {
        "problem", "op", "gpu", "suite", "kernel", "origin", "rival", "clock", "cache",
        "ratio", "low", "high", "verdict", "tflops",
    }  # fmt: skip
    assert all(promised <= set(row) for row in rows)
    assert [(row["gpu"], row["kernel"], row["rival"]) for row in rows] == [
        ("cpu", "sdpa", "sdpa_math"),
        ("cpu", "sdpa_math", "sdpa"),
        ("h200", "fwd_triton", "fa3"),
        ("h200", "fa3", "fwd_triton"),
        ("h200", "sdpa", "fwd_triton"),
    ]


@pytest.mark.parametrize(
    ("chosen", "kernels"),
    [
        (["--gpu", "h200"], {"fwd_triton", "fa3", "sdpa"}),
        (["--gpu", "NVIDIA H200"], {"fwd_triton", "fa3", "sdpa"}),
        (["--gpu", "cpu"], {"sdpa", "sdpa_math"}),
        (["--suite", "documents"], {"fwd_triton", "fa3", "sdpa"}),
        (["--gpu", "l4"], set()),
    ],
)
def test_rows_are_chosen(evidence: Path, flashmoe: Flashmoe, chosen: list[str], kernels: set[str]) -> None:
    code, out, _ = flashmoe("verdicts", "--json", "--evidence", evidence, *chosen)
    assert code == (0 if kernels else 3)
    assert {row["kernel"] for row in json.loads(out)} == kernels


def test_the_table_groups_by_suite_and_shows_no_colour_in_a_pipe(evidence: Path, flashmoe: Flashmoe) -> None:
    code, out, _ = flashmoe("verdicts", "--evidence", evidence)
    assert code == 0
    assert "documents on h200, graph clock, cold cache" in out
    assert "cpu on cpu, eager clock, cold cache" in out
    assert "\x1b" not in out
    lines = out.partition("documents on h200")[2].splitlines()
    line = lines[lines.index(PROBLEM) + 1].split()
    assert (line[0], line[-1]) == ("fwd_triton", "faster")


def test_no_verdict_is_not_good(evidence: Path, flashmoe: Flashmoe, recorded: Callable[..., Path], tmp_path: Path) -> None:
    chosen = ("--gpu", "cpu", "--suite", "documents")
    code, out, _ = flashmoe("verdicts", "--evidence", evidence, *chosen)
    assert (code, out) == (3, f"no number: no records of cpu, documents under {evidence}; flashmoe prove makes some\n")
    code, out, _ = flashmoe("verdicts", "--evidence", evidence, "--gpu", "l4")
    assert (code, out) == (3, f"no number: no records of l4 under {evidence}; flashmoe prove makes some\n")
    assert flashmoe("verdicts", "--evidence", evidence, "--gpu", "l4", "--json")[0:2] == (3, "[]\n")
    folder = recorded(Fabricate(), folder=tmp_path / "ended")  # a run that ended before it judged anything
    code, out, _ = flashmoe("verdicts", "--evidence", folder)
    assert (code, out) == (3, f"no number: no verdicts under {folder}; flashmoe prove makes some\n")


@pytest.mark.parametrize("command", ["verdicts", "report"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace('"schema_version":3', '"schema_version":4', 1), "schema version 4 is newer than 3"),
        (lambda text: text.replace(PROBLEM, "attn b2 h8"), "lacks q<n>, d<n>"),
    ],
)
def test_a_spoilt_record_is_one_line_and_exit_2(
    evidence: Path, flashmoe: Flashmoe, command: str, spoil: Callable[[str], str], said: str
) -> None:
    path = evidence / "runs" / "r1.jsonl"
    path.write_text(spoil(path.read_text()))
    code, out, err = flashmoe(command, "--evidence", evidence)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
    assert said in err


def test_a_torn_last_line_is_set_aside_with_a_warning(evidence: Path, flashmoe: Flashmoe) -> None:
    path = evidence / "runs" / "r1.jsonl"
    _, whole, _ = flashmoe("verdicts", "--evidence", evidence)
    path.write_text(path.read_text() + '{"kind": "timi')
    code, out, err = flashmoe("verdicts", "--evidence", evidence)
    assert (code, out, err.count("\n")) == (0, whole, 1)
    assert f"set aside: {path}:" in err
    assert err.endswith(f"to go on: flashmoe prove --resume {path.parent}\n"), "it takes the folder of a run"


def test_a_gpu_that_only_the_records_know_can_be_asked_for(recorded: Callable[..., Path], flashmoe: Flashmoe) -> None:
    folder = recorded(Fabricate(gpu="Radeon X").control().timed("fwd_triton", 20_000, "sdpa", 30_000))
    asked = [PROBLEM, "--kernel", "sdpa"]
    for command in (["verdicts"], ["diagnose", *asked]):
        code, out, err = flashmoe(*command, "--gpu", "radeon-x", "--evidence", folder)
        assert (code, err) == (0, "")
        assert "radeon-x" in out
        assert "it must be one of" in flashmoe(*command, "--gpu", "radeon-y", "--evidence", folder)[2]
