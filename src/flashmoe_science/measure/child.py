"""The child's end of a channel (``channel.Child``): requests in, answers out, one at a time."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from flashmoe_science.measure.bench import one_line

_PR_SET_PDEATHSIG = 1
OF_KERNEL = "raised by the kernel itself"  # the note of an error of memory that is no fault of the harness
_NO_DRIVER = "0 active drivers"  # how Triton begins

Command = Callable[[str], Callable[..., dict[str, Any]]]  # what answers a request, by its name


def serve(command: Command, after: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Answer requests until the other end closes, then end the process. ``after`` may add to each answer. What a function
    raises, a SystemExit included, is reported as a failure, and the process goes on."""
    die_with_parent(int(sys.argv[3]))
    with contextlib.suppress(OSError):  # where memory runs out, this process goes before the one that keeps the records
        Path("/proc/self/oom_score_adj").write_text("1000")
    incoming, outgoing = os.fdopen(int(sys.argv[1]), "rb"), int(sys.argv[2])
    loads, dumps, write = json.loads, json.dumps, os.write  # before any user code is imported
    for line in incoming:
        request = loads(line)
        try:
            answer = command(request["do"])(**request["what"])
        except BaseException as error:
            answer = failure(error)
        after(answer)
        message = dumps({"token": request["token"], "answer": answer}).encode() + b"\n"
        while message:
            message = message[write(outgoing, message) :]
    os._exit(0)  # threads and exit handlers of a user's code have nothing to add


def failure(error: BaseException) -> dict[str, Any]:
    """The answer to a request that failed: the reason as text; in ``memory``, whether the harness's own tensors did not fit."""
    of_harness = isinstance(error, torch.OutOfMemoryError) and OF_KERNEL not in getattr(error, "__notes__", ())
    return {"failed": _too_little(error) if of_harness else error_text(error), "memory": of_harness}


def _too_little(error: BaseException) -> str:
    asked = re.search(r"Tried to allocate ([\d.]+) (GiB|MiB)", str(error))
    held = torch.cuda.memory_allocated() / 2**30
    needed = held + float(asked[1]) / (1 if asked[2] == "GiB" else 1024) if asked else held
    words = f"{needed:.3g} GiB needed at least; {one_line(error)}"
    return f"not examined: the GPU has too little memory for the reference and the copies beside it ({words})"


def error_text(error: BaseException) -> str:
    """An exception as a reason: its type and its first line of text, or what it means."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    line = one_line(error)
    if line.partition(": ")[2].startswith(_NO_DRIVER):
        return "Triton finds no GPU driver here"
    return "; ".join((line, *getattr(error, "__notes__", ())))


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent (a process id) ends: a killed parent cannot end a hung child itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)
