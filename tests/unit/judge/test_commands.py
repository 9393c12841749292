"""The commands that show records: what they print, and what a wrong request is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.cli.main import main
from flashmoe_science.store import RunWriter

PROBLEM = "attn b2 h8 q512 d64 fp16"
Maker = Callable[..., Any]


@pytest.fixture
def evidence(fabricate: Maker, tmp_path: Path) -> Path:
    folder = tmp_path / "evidence"
    run = fabricate().control().timed("fwd_triton", 20_000, "fa3", 24_000).timed("fwd_triton", 20_000, "sdpa", 30_000)
    cpu = (
        fabricate("cpu", gpu=None, suite="cpu")
        .control("sdpa", clock="eager")
        .timed("sdpa", 2e4, "sdpa_math", 6e4, clock="eager")
    )
    for made in (run.done(), cpu.done()):
        with RunWriter(folder / "runs" / made.header.environment.platform / f"{made.header.run}.jsonl") as writer:
            for row in (made.header, *made.rows):
                writer.append(row)
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_json_holds_the_fields_that_are_promised(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verdicts", "--json", "--evidence", evidence)
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
def test_rows_are_chosen(evidence: Path, capsys: pytest.CaptureFixture[str], chosen: list[str], kernels: set[str]) -> None:
    code, out, _ = call(capsys, "verdicts", "--json", "--evidence", evidence, *chosen)
    assert code == 0
    assert {row["kernel"] for row in json.loads(out)} == kernels


def test_the_table_groups_by_suite_and_shows_no_colour_in_a_pipe(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verdicts", "--evidence", evidence)
    assert code == 0
    assert "documents on h200, graph clock, cold cache" in out
    assert "cpu on cpu, eager clock, cold cache" in out
    assert "\x1b" not in out
    line = next(line for line in out.splitlines() if line.startswith(PROBLEM) and "fa3" in line)
    assert "fwd_triton" in line
    assert line.rstrip().endswith("faster")


def test_an_empty_folder_has_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "verdicts", "--evidence", tmp_path)[0:2] == (0, f"No records under {tmp_path}.\n")
    assert call(capsys, "verdicts", "--json", "--evidence", tmp_path)[1] == "[]\n"


@pytest.mark.parametrize("command", ["verdicts", "report"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace('"schema_version":2', '"schema_version":3', 1), "schema version 3 is newer than 2"),
        (lambda text: text.replace(PROBLEM, "attn b2 h8"), "lacks q<n>, d<n>"),
    ],
)
def test_a_spoilt_record_is_one_line_and_exit_2(
    evidence: Path, capsys: pytest.CaptureFixture[str], command: str, spoil: Callable[[str], str], said: str
) -> None:
    path = evidence / "runs" / "Linux" / "r1.jsonl"
    path.write_text(spoil(path.read_text()))
    code, out, err = call(capsys, command, "--evidence", evidence)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
    assert said in err


def test_a_torn_last_line_is_set_aside_with_a_warning(evidence: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = evidence / "runs" / "Linux" / "r1.jsonl"
    _, whole, _ = call(capsys, "verdicts", "--evidence", evidence)
    path.write_text(path.read_text() + '{"kind": "timi')
    code, out, err = call(capsys, "verdicts", "--evidence", evidence)
    assert (code, out, err.count("\n")) == (0, whole, 1)
    assert f"set aside: {path}:" in err
    assert err.endswith(f"to go on: flashmoe prove --resume {path.parent}\n"), "it takes the folder of a run"


def test_a_report_is_written_where_asked(evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pages"
    code, printed, _ = call(capsys, "report", "--evidence", evidence, "--out", out)
    assert code == 0
    assert printed.split() == [str(out / name) for name in ("report.html", "report.md", "report.csv")]
    assert "fwd_triton" in (out / "report.html").read_text()


def test_a_gpu_that_only_the_records_know_can_be_asked_for(
    fabricate: Maker, recorded: Callable[..., Path], flashmoe: Callable[..., tuple[int, str, str]]
) -> None:
    folder = recorded(fabricate(gpu="Radeon X").control().timed("fwd_triton", 20_000, "sdpa", 30_000))
    asked = [PROBLEM, "--kernel", "sdpa"]
    for command in (["verdicts"], ["diagnose", *asked]):
        code, out, err = flashmoe(*command, "--gpu", "radeon-x", "--evidence", folder)
        assert (code, err) == (0, "")
        assert "radeon-x" in out
        assert "it must be one of" in flashmoe(*command, "--gpu", "radeon-y", "--evidence", folder)[2]
