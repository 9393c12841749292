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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verdicts", "--gpu", "h2000"], "gpu is 'h2000'; it must be one of"),
        (["verdicts", "--suite", "documets"], "suite is 'documets'; it must be one of "),
        (["verdicts", "--evidence", "nowhere"], "--evidence is 'nowhere', which is not a folder"),
        (["report", "--evidence", "nowhere"], "--evidence is 'nowhere', which is not a folder"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(
    evidence: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    if "nowhere" not in arguments:
        arguments = [*arguments, "--evidence", str(evidence)]
    code, out, err = call(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


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


def test_a_report_of_nothing_and_into_nothing_is_one_line(
    evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = call(capsys, "report", "--evidence", tmp_path / "empty")
    assert (code, "holds no records" in err) == (2, True)
    (tmp_path / "plain").write_text("x")
    code, _, err = call(capsys, "report", "--evidence", evidence, "--out", tmp_path / "plain")
    assert (code, err.count("\n"), "file exists" in err) == (2, 1, True)


@pytest.mark.parametrize("command", [["verdicts"], ["compare", "fwd_triton", "sdpa"]])
def test_a_table_loses_nothing_that_matters_where_the_terminal_is_narrow(
    evidence: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = call(capsys, *command, "--evidence", evidence)
    assert code == 0
    assert "fwd_triton" in out
    assert "…" not in out


def test_times_and_rates_are_shown_in_80_columns_whatever_the_names(
    fabricate: Maker,
    recorded: Callable[..., Path],
    flashmoe: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    mine, theirs = "examples/cpu_attention.py:attention", "examples/v1_attention.py:attention"
    run = fabricate().control(mine).timed(mine, 1_234_560, "sdpa", 1_200_000).timed(mine, 1_234_560, theirs, 1_100_000)
    _, out, _ = flashmoe("verdicts", "--evidence", recorded(run))
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:2] == ["us", "TFLOP/s"]
    place = lines.index(f"  {mine}, rival {theirs}")
    time, rate, ratio, *_, verdict = lines[place + 1].split()
    assert (float(time), float(rate), verdict) == (pytest.approx(1234.56, rel=0.01), pytest.approx(0.87, rel=0.01), "slower")
    assert ratio.endswith("x")


@pytest.mark.parametrize("option", ["--evidence", "--runs"])
@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_folder_name_is_refused_in_words(
    flashmoe: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    """As a path it would be the folder that one stands in."""
    monkeypatch.chdir(tmp_path)
    commands = [["ratchet"]] if option == "--runs" else [["verdicts"], ["report"], ["compare", "a", "b"], ["diagnose"]]
    for command in commands:
        code, out, err = flashmoe(*command, option, name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"Invalid value for '{option}': it is empty; give a folder" in err


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


def test_a_run_without_a_verdict_is_a_record(
    fabricate: Maker, recorded: Callable[..., Path], flashmoe: Callable[..., tuple[int, str, str]]
) -> None:
    folder = recorded(fabricate())
    assert flashmoe("verdicts", "--evidence", folder)[:2] == (0, f"No verdicts under {folder}.\n")


@pytest.mark.parametrize(
    "command",
    [["verdicts"], ["report"], ["diagnose", "attn b1 h1 q8 d8 fp16", "--kernel", "k", "--recorded"], ["compare", "a", "b"]],
)
def test_away_from_a_checkout_a_command_says_what_to_give_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *command)
    assert (code, out) == (2, "")
    assert err == "flashmoe: --evidence is 'evidence', which is not a folder; give one that holds run records (*.jsonl)\n"
