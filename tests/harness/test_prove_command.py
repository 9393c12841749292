"""``flashmoe prove`` from the command line on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashmoe_science.cli import prove as command
from flashmoe_science.cli.main import main
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import operation
from flashmoe_science.store import read_run

TINY = "attn b1 h2 q16 d16 fp32"
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def prove(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashmoe_science", "prove", *arguments]
    return subprocess.run(command, cwd=cwd, env=NO_GPU, capture_output=True, text=True, timeout=600, check=False)


def assert_refused(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, in this process and as on a machine without a GPU, ends in this one line."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["prove", *arguments])
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert said.out == ""


def test_a_comparison_on_the_cpu_from_command_to_report(tmp_path: Path) -> None:
    done = prove(TINY, "--kernel", "sdpa", "--against", "sdpa_math", "--quick", "--json", "--out", "proof", cwd=tmp_path)
    assert done.returncode in (0, 3), done.stderr  # 3: this machine's other work disturbed the only pair there is
    said = json.loads(done.stdout)
    assert said["exit_code"] == done.returncode
    assert (said["checked"], said["wrong"], said["untrustworthy"]) == (2, [], [])
    run = read_run(tmp_path / "proof" / "run-custom.jsonl")
    refused = {row.kernel for row in run.rows if row.kind == "refusal"}  # a disturbed peer has no verdict, but a reason
    assert {verdict["kernel"] for verdict in said["verdicts"]} | refused == {"sdpa", "sdpa_math"}
    assert run.complete
    assert run.header.command[1:3] == ["prove", TINY]
    assert {path.name for path in (tmp_path / "proof").iterdir()} == {
        "run-custom.jsonl",
        "report.html",
        "report.md",
        "report.csv",
    }


def proved_here(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The command in this process, as on a machine without a GPU: its exit code and what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["prove", *arguments, "--quick", "--out", "proof"])
    return int(stopped.value.code or 0), capsys.readouterr().out


def test_an_operation_without_a_kernel_of_ours_is_shown_by_the_frameworks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = proved_here(["moe t4 e2 k1 d8 f8 fp32"], tmp_path, monkeypatch, capsys)
    assert code in (0, 3)  # 3: this machine's other work disturbed every pair
    run = read_run(tmp_path / "proof" / "run-custom.jsonl")
    assert run.complete
    assert run.done_by(None) == {"moe t4 e2 k1 d8 f8 fp32"}
    subject = operation("moe").fallback()
    assert {row.kernel for row in run.rows if row.kind == "timing"} <= {subject}
    passed = {row.kernel: row.passed for row in run.rows if row.kind == "correctness"}
    assert passed == {peer.name: True for peer in operation("moe").peers() if peer.on_cpu}


def test_a_run_with_a_refused_row_is_not_called_all_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def judged(folder: Path) -> tuple[list[Verdict], str]:
        (one, *others), cost = judge(folder)
        others = [replace(other, verdict="equivalent") for other in others]
        return [replace(one, verdict="refused", reason="its control is off"), *others], cost

    judge = command.judge
    monkeypatch.setattr(command, "judge", judged)
    code, said = proved_here([TINY, "--kernel", "sdpa", "--against", "sdpa_math"], tmp_path, monkeypatch, capsys)
    assert code in (0, 3)
    assert "all good" not in said
    assert "good, but for 1 refused number:" in said or code == 3


@pytest.mark.slow
def test_everything_that_can_be_proved_without_a_gpu(tmp_path: Path) -> None:
    done = prove("--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "reports").iterdir()
    without = read_run(folder / "run-no-gpu.jsonl")
    assert without.complete
    assert {row.passed for row in without.rows if row.kind == "correctness"} == {True}
    assert any(row.kind == "note" and "builds for l4" in row.text for row in without.rows)
    assert any(row.kind == "timing" for row in read_run(folder / "run-cpu.jsonl").rows)
    assert "all good" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dokuments"], "'dokuments' is neither a problem (those begin with 'attn' or 'moe' or 'op')"),
        (["attn b1 h1 q8"], "problem 'attn b1 h1 q8' lacks d<n>"),
        (["long"], "suite 'long' needs a GPU, and there is none here"),
        ([TINY, "--kernel", "fwd"], "kernel is 'fwd'; it must be one of"),
        ([TINY, "--kernel", "sdpa", "--against", "nobody"], "--against is 'nobody'; for attention it must be one of"),
        ([TINY, "--kernel", "sdpa", "--against", "fa3"], "kernel 'fa3' cannot be measured here: fa3-fwd is not installed"),
        ([TINY, "--kernel", "sdpa_cudnn"], "kernel 'sdpa_cudnn' can serve none of the problems here"),
        ([TINY, "--kernel", "sdpa", "--against", "sdpa"], "--against leaves no rival for sdpa"),
        ([TINY, "--quick", "--full"], "--quick and --full are both given"),
        ([TINY, "--budget", "0"], "--budget is '0'; it must be more than 0"),
        ([TINY, "--budget", "2usd"], "--budget is '2usd'; it must be seconds"),
        ([TINY, "--watchdog", "inf"], "--watchdog is inf; it must be more than 0"),
        ([TINY, "--seed", str(2**64)], "--seed is 18446744073709551616; it must be from 0 to"),
        (["--resume", "absent"], "--resume is 'absent', which is no folder; give the folder of a run"),
        ([TINY, "--quick", "--resume", "taken"], "--resume takes the options that the run was given; leave out"),
        ([TINY, "--out", "taken/inside"], "--out is 'taken/inside', which cannot be written"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert_refused(arguments, message, tmp_path, monkeypatch, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
