"""The part of the L2 cache that is set aside for persisting lines: a kernel with such lines is timed warm on any inputs.

CUDA lets a program keep up to three quarters of the L2 for its own lines, over launches and over other data. It outlasts the
rotation of inputs that makes a cache cold, so nothing may be set aside when a pair is timed. The driver itself is asked, as
PyTorch does not show it.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from typing import Any

_PERSISTING_L2 = 0x06  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE


def set_aside_bytes() -> int | None:
    """Bytes of the L2 set aside in the current context; None where no driver can be asked, or it knows no such limit."""
    driver, limit = _driver(), ctypes.c_size_t()
    if driver is None or driver.cuCtxGetLimit(ctypes.byref(limit), _PERSISTING_L2) != 0:
        return None
    return limit.value


def release() -> None:
    """Set nothing aside and drop the persisting lines."""
    driver = _driver()
    if driver is not None and set_aside_bytes():
        driver.cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(0))
        driver.cuCtxResetPersistingL2Cache()


@functools.cache
def _driver() -> Any | None:
    with suppress(OSError):  # no driver here
        return ctypes.CDLL("libcuda.so.1")
    return None
