"""One run at a time on a GPU: two that time side by side disturb each other, and the numbers of neither are worth anything.

The lock is a file in the temporary folder, named after the device; it is let go when its process ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flashmoe_science.locks import hold

_WAIT_S = 60.0
_LOOK_EVERY_S = 0.5


class DeviceBusy(ValueError):
    """Another run times on the device, said in one line with what can be done."""


@contextmanager
def alone_on(device: torch.device, tell: Callable[[str], None]) -> Iterator[None]:
    """Have a GPU to oneself, after waiting for another run, of which ``tell`` is told; a CPU is shared.

    Raises:
        DeviceBusy: another run held it for a minute.
    """
    no_links = getattr(os, "O_NOFOLLOW", 0)  # anyone may put a link into a temporary folder
    try:
        if device.type != "cuda":
            raise OSError
        name = f"flashmoe-{torch.cuda.get_device_properties(device).uuid}.lock"
        file = os.open(Path(tempfile.gettempdir(), name), os.O_RDONLY | os.O_CREAT | no_links, 0o666)
    except OSError:  # no place for a lock: nothing can be known of others
        yield
        return
    try:
        until = time.monotonic() + _WAIT_S
        while not hold(file):
            if time.monotonic() >= until:
                raise DeviceBusy("another flashmoe run is timing on this GPU; wait until it ends")
            tell("waiting for another flashmoe run on this GPU")
            time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        os.close(file)
