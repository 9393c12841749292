"""``flashmoe prove`` from the command line on a machine without a GPU, on one whose disk fills up, and twice at once."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
from tests.harness.prove_command import NO_GPU, PEERS, TINY, prove, start, wait_for

from flashmoe_science.store import read_run

SMALL = "attn b1 h2 q17 d16 fp16 causal"


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


@pytest.mark.slow
@pytest.mark.parametrize("words", [[SMALL, "--kernel", "fwd_triton"], pytest.param([], marks=pytest.mark.redundant)])
def test_everything_that_can_be_proved_without_a_gpu(words: list[str], tmp_path: Path) -> None:
    done = prove(tmp_path, "--quick", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "reports").iterdir()
    without = read_run(folder / "run-no-gpu.jsonl")
    assert without.complete
    assert {row.passed for row in without.rows if row.kind == "correctness"} == {True}
    assert any(row.kind == "note" and "builds for l4" in row.text for row in without.rows)
    if not words:
        assert any(row.kind == "timing" for row in read_run(folder / "run-cpu.jsonl").rows)
    lines = done.stdout.splitlines()
    assert len(lines) <= 8  # with `flashmoe claims`, which `make prove` runs after it, ten at most
    assert "all good" in " ".join(lines[-2:])


def no_large_file() -> None:
    """No file may grow beyond 1500 bytes, less than a run has, which a write meets as it meets a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))


def test_a_full_disk_ends_the_run_in_one_line_with_the_rows_that_were_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without room for a header is in tests/unit/store."""
    (tmp_path / "evidence" / "runs").mkdir(parents=True)  # none that would have to be judged again
    monkeypatch.setitem(NO_GPU, "PYTHONDONTWRITEBYTECODE", "1")
    done = prove(tmp_path, TINY, *PEERS, "--out", "proof", preexec_fn=no_large_file)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot append to proof/run-custom.jsonl: file too large; the rows before it are kept" in last
    assert "Traceback" not in done.stderr
    run = read_run(tmp_path / "proof" / "run-custom.jsonl")
    assert (run.torn, run.complete) == (None, False)
    for report in (tmp_path / "proof").glob("report.*"):
        assert report.stat().st_size < 1500, "a report that did not fit was left cut"


@pytest.mark.slow
@pytest.mark.redundant  # tests/unit/store holds the lock
def test_a_run_that_is_alive_is_not_gone_on_with_and_its_file_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "proof" / "run-custom.jsonl"
    with start(tmp_path, TINY, *PEERS, "--out", "proof") as first:
        wait_for(first, path)
        first.send_signal(signal.SIGSTOP)  # alive, however slow this machine is
        try:
            second = prove(tmp_path, "--resume", "proof")
            assert second.returncode == 2
            assert "run-custom.jsonl is being written by another process; wait until that run ends" in second.stderr
            prove(tmp_path, TINY, *PEERS, "--out", "proof")
        finally:
            first.send_signal(signal.SIGCONT)
        first.communicate(timeout=300)
    assert first.returncode in (0, 3)
    for one in (path, path.with_name("run-custom-2.jsonl")):
        run = read_run(one)
        assert run.complete
        assert run.done_by(None) == {TINY}
