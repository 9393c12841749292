"""``flashmoe prove`` from the command line on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.harness.prove_command import PEERS, TINY, prove

from flashmoe_science.cli import prove as command
from flashmoe_science.cli.main import main
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.store import read_run


def test_a_comparison_on_the_cpu_from_command_to_report(tmp_path: Path) -> None:
    done = prove(tmp_path, TINY, *PEERS, "--json", "--out", "proof")
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


def test_a_run_with_a_refused_row_is_not_called_all_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def judged(folder: Path) -> tuple[list[Verdict], str]:
        (one, *others), cost = judge(folder)
        others = [replace(other, verdict="equivalent") for other in others]
        return [replace(one, verdict="refused", reason="its control is off"), *others], cost

    judge = command.judge
    monkeypatch.setattr(command, "judge", judged)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["prove", TINY, *PEERS, "--out", "proof"])
    code, said = int(stopped.value.code or 0), capsys.readouterr().out
    assert code in (0, 3)
    assert "all good" not in said
    assert "good, but for 1 refused number:" in said or code == 3


@pytest.mark.slow
def test_everything_that_can_be_proved_without_a_gpu(tmp_path: Path) -> None:
    done = prove(tmp_path, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "reports").iterdir()
    without = read_run(folder / "run-no-gpu.jsonl")
    assert without.complete
    assert {row.passed for row in without.rows if row.kind == "correctness"} == {True}
    assert any(row.kind == "note" and "builds for l4" in row.text for row in without.rows)
    assert any(row.kind == "timing" for row in read_run(folder / "run-cpu.jsonl").rows)
    assert "all good" in done.stdout
