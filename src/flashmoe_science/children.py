"""What a process does that another started for its work: it ends when that one has, even where it was killed.

A pool's processes wait for their next job on a pipe that they hold open themselves, so that nothing tells them that nobody will
ever send one. They would keep a GPU's memory for good.
"""

from __future__ import annotations

import os
import threading
import time

_LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """Begin to watch the parent, in a thread that does nothing else; this process ends within a second or so of it."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
