"""One run at a time on a GPU: two that time side by side disturb each other, and the numbers of neither are worth anything.

The lock is a file in the temporary folder, named after the device; it is let go when its process ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

from flashmoe_science.locks import hold

WAIT_S = 60.0
_LOOK_EVERY_S = 0.5


class DeviceBusy(ValueError):
    """Another run times on the device, said in one line with what can be done."""


def device_name(device: torch.device) -> str:
    """What tells this device from others of the machine: a GPU's UUID; "cpu" for the CPU."""
    if device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def turn(
    name: str,
    share: bool,
    tell: Callable[[str], None],
    wait_s: float = WAIT_S,
    folder: Path | None = None,
) -> Iterator[str | None]:
    """Have the device to oneself, after waiting for another run. Yields what the record should say, None where that is nothing.

    On a CPU, and with ``share`` on a GPU, nobody waits: another run is only noted.

    Raises:
        DeviceBusy: another run held it for ``wait_s`` seconds.
    """
    try:
        file = _open((folder or Path(tempfile.gettempdir())) / f"flashmoe-{name}.lock")
    except OSError:  # no place for a lock: nothing can be known of others
        yield None
        return
    with file:
        until = time.monotonic() + wait_s
        while not hold(file, shared=share):
            other = _holder(file)
            if share or name == "cpu":
                yield f"another flashmoe run{other} was timing on this {'CPU' if name == 'cpu' else 'GPU'} at the same time"
                return
            if time.monotonic() >= until:
                raise DeviceBusy(f"another flashmoe run{other} is timing on this GPU; wait until it ends, or pass --share")
            tell(f"waiting for another flashmoe run{other} on this GPU")
            time.sleep(min(_LOOK_EVERY_S, wait_s))
        with suppress(OSError):  # another user's file can be locked, not written
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield None


def _open(path: Path) -> IO[bytes]:
    no_links = getattr(os, "O_NOFOLLOW", 0)  # anyone may put a link into a temporary folder
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | no_links, 0o666), "r+b", buffering=0)
    except PermissionError:
        return os.fdopen(os.open(path, os.O_RDONLY | no_links), "rb", buffering=0)


def _holder(file: IO[bytes]) -> str:
    file.seek(0)
    pid = file.read(20).decode(errors="replace")
    file.seek(0)
    return f" (pid {pid})" if pid.isdigit() else ""
