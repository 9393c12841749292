"""A command of another tool, such as a profiler, run to its end or to a time limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from flashmoe_science.measure.child import die_with_parent


def find_tool(name: str, places: Sequence[str]) -> str | None:
    """A tool's path: on PATH, else where its installers put it (patterns under /), the newest first."""
    found = [str(path) for place in places for path in sorted(Path("/").glob(place), reverse=True)]
    return shutil.which(name) or next(iter(found), None)


def run_tool(command: Sequence[str], timeout_s: float, settings: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """What a command printed on both its streams, and whether it ran past its time; then it and its children are ended."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"} | dict(settings or {}),  # C: decimal points
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),  # a run that is killed leaves nothing on the device
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
        return printed, False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return printed, True
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
