"""The package's folder in the user's cache: tuned tables and cached verdicts."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """``flashmoe-science`` in XDG_CACHE_HOME, else in ~/.cache. It need not exist. Raises RuntimeError: there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flashmoe-science")
