"""Work that needs a process of its own: another setting of Triton, or a profiler that must not stay attached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence


def lines_from(module: str, text: str, settings: Mapping[str, str]) -> Iterator[str]:
    """Run ``python -m module`` with ``text`` on its standard input; yield the lines of JSON that it prints, as they come.

    Raises:
        RuntimeError: the process ended badly; the message is the last thing that it said.
    """
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+", errors="replace") as said:
        given.write(text)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=os.environ | dict(settings),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=said,  # a file: a pipe that nobody reads would stop a talkative child
            text=True,
        )
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith("{"):
                        yield line
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            said.seek(0)
            last = [line for line in said.read().splitlines() if line.strip()][-1:] or ["(it said nothing)"]
            raise RuntimeError(f"{module} ended with code {process.returncode}: {last[0].strip()[:300]}")


def heard(command: Sequence[str], timeout_s: float, settings: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """What a command said on both its streams, and whether it ran past its time; then it and its children are ended."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"} | dict(settings or {}),  # C: decimal points
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
        return said, False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return said, True
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
