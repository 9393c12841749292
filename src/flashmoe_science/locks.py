"""Advisory locks on open files, which end with the process however it ends. Where there are none, every file is free."""

from __future__ import annotations

import sys
from typing import IO, Any

if sys.platform != "win32":
    import fcntl


def hold(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file (or its descriptor) until it is closed, without waiting. False where another process holds it.

    ``shared`` holders hold it together, and keep out those that want it alone.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
