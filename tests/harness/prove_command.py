"""``flashmoe prove`` in a process of its own, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TINY = "attn b1 h2 q16 d16 fp32"
PEERS = ["--kernel", "sdpa", "--against", "sdpa_math", "--quick"]
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def start(folder: Path, *arguments: str, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flashmoe_science", "prove", *arguments]
    return subprocess.Popen(command, cwd=folder, env=NO_GPU, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def prove(folder: Path, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    with start(folder, *arguments, **how) as process:
        said = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def wait_for(process: subprocess.Popen[str], path: Path, word: bytes = b"\n", count: int = 1) -> None:
    """Wait until a record holds ``word`` so often, or the process has ended."""
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until:
        if path.exists() and path.read_bytes().count(word) >= count:
            return
        time.sleep(0.005)
