"""Two runs at once do not mix: neither writes into the other's file, and a run that is alive is not gone on with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.harness.prove_command import PEERS, TINY, prove, start, wait_for

from flashmoe_science.store import read_run


@pytest.mark.slow
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
