"""Workers and oracles asked in this process and in a child, and how a child words what went wrong in it."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from flashmoe_science.kernel import CannotServe
from flashmoe_science.measure.channel import Child, Failed, InProcess, TooLittleMemory, _without_surrogates
from flashmoe_science.measure.child import error_text
from flashmoe_science.measure.oracle import MODULE as ORACLE
from flashmoe_science.measure.worker.callers import _by_kernel


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_child_is_the_first_to_go_where_memory_runs_out_and_ends_when_it_is_closed() -> None:
    with closing(Child(ORACLE, 60.0)) as child:
        assert child.ask("open", contract="attention") == {}
        with pytest.raises(Failed, match="contract is 'nothing'; it must be"):
            child.ask("open", contract="nothing")
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"
        assert child.request_ns >= child.last_wall_ns > 0
        pid = child.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not child.alive


def test_what_no_file_can_hold_is_left_out_of_an_answer() -> None:
    assert _without_surrogates({"failed": "a\ud800b", "deep": [{"\udcff": 1.5}]}) == {
        "failed": "a?b",
        "deep": [{"?": 1.5}],
    }


def test_what_a_function_of_this_process_raises_is_a_failure_in_words() -> None:
    def fails() -> dict[str, object]:
        raise CannotServe("k is not aligned to 16 bytes")

    channel = InProcess({"fail": fails, "ping": dict}.__getitem__)
    assert channel.ask("ping") == {}
    assert channel.last_wall_ns > 0
    with pytest.raises(Failed) as failed:
        channel.ask("fail")
    assert failed.value.cannot_serve == "k is not aligned to 16 bytes"
    assert Failed("RuntimeError: no").cannot_serve is None


def out_of_memory() -> dict[str, object]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has 79.1 GiB.")


def test_memory_that_the_harness_lacks_is_no_failure_of_a_kernel() -> None:
    channel = InProcess({"reference": out_of_memory, "kernel": lambda: _by_kernel(out_of_memory)}.__getitem__)
    words = r"not examined: the GPU has too little memory for the reference .*\(7 GiB needed at least; OutOfMemoryError: CUDA"
    with pytest.raises(TooLittleMemory, match=words):
        channel.ask("reference")
    with pytest.raises(Failed, match=r"OutOfMemoryError: CUDA out of memory.*raised by the kernel itself"):
        channel.ask("kernel")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_is_told_by_its_first_words_or_its_name() -> None:
    assert error_text(ValueError("\n  too long \n more")) == "ValueError: too long"
    assert error_text(Wordless()) == "Wordless"
    assert error_text(SystemExit(3)) == "it called sys.exit(3)"
    assert len(error_text(ValueError("x" * 10**6))) < 400


TOOL = """
import os, sys
from flashmoe_science.measure.profile.ncu import run_tool
run_tool([sys.executable, "-c", "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)"], 600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at the parent's death")
def test_a_tool_ends_with_the_run_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", TOOL], cwd=tmp_path) as run:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")):
            time.sleep(0.02)
        run.kill()
    tool = Path("/proc", (tmp_path / "pid").read_text().strip())
    for _ in range(200):
        if not tool.exists() or "\nState:\tZ" in (tool / "status").read_text():
            return
        time.sleep(0.02)
    pytest.fail("it goes on")
