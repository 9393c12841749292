"""How a child words what went wrong in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashmoe_science.measure.child import in_words


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_is_told_by_its_first_words_or_its_name() -> None:
    assert in_words(ValueError("\n  too long \n more")) == "ValueError: too long"
    assert in_words(Wordless()) == "Wordless"
    assert in_words(SystemExit(3)) == "it called sys.exit(3)"
    assert len(in_words(ValueError("x" * 10**6))) < 400


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
