"""Ranks of a test, and programs, forked from one process that has imported what they run: each by itself, they took longer to
import it than to run it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import NamedTemporaryFile

from torch.multiprocessing import start_processes


def on_ranks(ranks: int, function: Callable[..., None], *given: object) -> None:
    """Call the function of a module with each rank, and with what is given, in a process of its own. Raises what one raises."""
    set_forkserver_preload(["tests.unit.imported"])
    start_processes(function, given, nprocs=ranks, start_method="forkserver")


def program(path: Path, *options: str) -> str:
    """What a program prints, in a process of its own. Raises what it raises, and where it ends with another code than 0."""
    with NamedTemporaryFile() as printed:
        on_ranks(1, _run, str(path), options, printed.name)
        return Path(printed.name).read_text(encoding="utf-8")


def _run(rank: int, path: str, options: Sequence[str], printed: str) -> None:
    sys.argv, sys.path[:0] = [path, *options], [str(Path(path).parent)]
    with open(printed, "w", encoding="utf-8") as out, redirect_stdout(out):
        runpy.run_path(path, run_name="__main__")
