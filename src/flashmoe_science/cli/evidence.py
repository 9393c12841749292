"""The folder of records, and the reading of them for commands that show them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.store import Run, read_runs

DEFAULT = Path("evidence")
CLAIMS = "claims.toml"


def folder_named(name: str | Path) -> Path:
    """The name as a path. Raises BadParameter for an empty name, which as a path would be the working directory."""
    if not str(name).strip():
        raise typer.BadParameter("it is empty; give a folder that holds run records (*.jsonl), or . for this one")
    return Path(name)


Evidence = Annotated[Path, typer.Option("--evidence", parser=folder_named, metavar="PATH", help="Folder with run records.")]


def runs_under(folder: Path, option: str = "--evidence") -> list[Run]:
    """Every run under a folder. A torn last line, which a killed run leaves, is set aside with a warning on stderr.
    Raises ValueError: no such folder, or a file in it that is from a newer schema or no record. One line."""
    if not folder.is_dir():
        raise ValueError(f"{option} is {str(folder)!r}, which is not a folder; give one that holds run records (*.jsonl)")
    runs = read_runs(folder)
    for run in runs:
        if run.torn:
            resume = f"; to go on: flashmoe prove --resume {run.path.parent}" if run.path else ""
            typer.echo(f"set aside: {run.torn}; the rows before it count{resume}", err=True)
    return runs


def judged_under(folder: Path, option: str = "--evidence") -> list[JudgedRun]:
    """The runs of ``runs_under``, to be judged. Raises ValueError also where there is none."""
    runs = runs_under(folder, option)
    if not runs:
        raise ValueError(f"{option} is {str(folder)!r}, which holds no records (*.jsonl); run flashmoe prove to make some")
    return [JudgedRun(run) for run in runs]


def machine_named(gpu: str | None, recorded: Iterable[str]) -> str | None:
    """The short name of a machine, as in the records, else as in the table of GPUs. Raises ValueError for one that is in
    neither."""
    return gpu if gpu in {*recorded, "cpu", None} else gpu_named(gpu or "").name


def suite_named(suite: str | None, recorded: Iterable[str], folder: Path) -> str | None:
    """The suite as it is given. Raises ValueError for a suite without runs."""
    if suite not in (None, *(found := dict.fromkeys(recorded))):
        raise ValueError(f"--suite is {suite!r}; it must be one of {', '.join(found)}, which are on record under {folder}")
    return suite
