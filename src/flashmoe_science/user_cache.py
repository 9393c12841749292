"""The folder where this package keeps what it found on this machine for its user."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """``flashmoe-science`` in XDG_CACHE_HOME, else in ~/.cache. It need not exist. Raises RuntimeError: there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flashmoe-science")
