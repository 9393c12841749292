"""A disk that fills up while ``flashmoe prove`` runs: an error in one line, whole rows, and no half of anything."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from tests.harness.prove_command import NO_GPU, PEERS, TINY, prove

from flashmoe_science.store import read_run


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
