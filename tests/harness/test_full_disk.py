"""A disk that fills up while ``flashmoe prove`` runs: an error in one line, whole rows, and no half of anything."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from flashmoe_science.store import read_run

COMMAND = [sys.executable, "-m", "flashmoe_science", "prove"]
ASKED = ["attn b1 h2 q16 d16 fp32", "--kernel", "sdpa", "--against", "sdpa_math", "--quick", "--out", "proof"]
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def prove(folder: Path, file_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run the command where no file may grow beyond ``file_bytes``, which a write meets as it meets a full disk."""
    return subprocess.run(
        [*COMMAND, *ASKED],
        cwd=folder,
        env=NO_GPU | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_full_disk_ends_the_run_in_one_line_with_the_rows_that_were_whole(tmp_path: Path) -> None:
    """A disk without room for a header is in tests/unit/store."""
    (tmp_path / "evidence" / "runs").mkdir(parents=True)  # none that would have to be judged again
    done = prove(tmp_path, file_bytes=1500)  # less than a run
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot append to proof/run-custom.jsonl: file too large; the rows before it are kept" in last
    assert "Traceback" not in done.stderr
    run = read_run(tmp_path / "proof" / "run-custom.jsonl")
    assert (run.torn, run.complete) == (None, False)
    for report in (tmp_path / "proof").glob("report.*"):
        assert report.stat().st_size < 1500, "a report that did not fit was left cut"
