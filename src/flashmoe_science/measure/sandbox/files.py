"""Files that a function opens for writing: no fault, but worth knowing."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

_MOST_FILES = 3  # that are named
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
_AT_HOME = (".triton", ".cache", ".nv")


class FilesWritten:
    """Files that this process opens for writing, as far as Python opens them; not those that libraries open. Caches of
    compilers and folders for temporary files are left out."""

    def __init__(self) -> None:
        home = Path.home()
        places = [tempfile.gettempdir(), "/dev", "/proc", *(str(home / one) for one in _AT_HOME)]
        places += [os.environ[name] for name in _CACHES if os.environ.get(name)]
        self._others = tuple(os.path.join(os.path.realpath(one), "") for one in places)
        self._opened: dict[str, None] = {}
        self._told = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and isinstance(path, str | bytes):
                self._opened[os.fsdecode(path)] = None

    def written(self) -> list[str]:
        """Those opened since the last look, in words: a few of them by name, and none after those."""
        if not self._opened:
            return []
        found = [path for path in self._opened if not self._is_elsewhere(path)]
        self._opened.clear()
        named = found[: _MOST_FILES - self._told]
        self._told += len(named)
        return [f"it opens a file for writing: {path}" for path in named]

    def _is_elsewhere(self, path: str) -> bool:
        whole = os.path.realpath(path)
        return whole.startswith(self._others) or "__pycache__" in whole
