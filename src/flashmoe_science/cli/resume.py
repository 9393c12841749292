"""``flashmoe prove --resume``: the command that made a folder's runs, and the file of each as it is gone on with."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flashmoe_science.store import Run, RunWriter

_RUNS = "run-*.jsonl"


def recorded(place: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder that a run lies in and the command that made it. ``place`` is the folder or one of its run files.

    Raises:
        ValueError: there is no run, or there are runs of several commands, so that a file must be named.
        StoreError: a file that is no run.
    """
    folder = place if place.is_dir() else place.parent
    paths = sorted(folder.glob(_RUNS)) if place.is_dir() else [place]
    if not place.exists():
        raise ValueError(f"--resume is {str(place)!r}, which does not exist; give the folder of a run, or its file")
    commands = {command: path for path in paths if (command := _command(path)) is not None}
    if not commands:
        raise ValueError(f"--resume is {str(place)!r}, where no run has begun ({_RUNS} with a first row); start it anew")
    if len(commands) > 1:
        names = ", ".join(str(path) for path in commands.values())
        raise ValueError(f"--resume is {str(place)!r}, which holds runs of {len(commands)} commands; give one of {names}")
    ((command, path),) = commands.items()
    if command[:2] != ("flashmoe", "prove"):
        raise ValueError(f"{path} was not made by flashmoe prove but by {' '.join(command)!r}; it cannot be gone on with")
    return folder, command


def options_of(command: Sequence[str]) -> dict[str, Any]:
    """The options that a recorded ``flashmoe prove`` was given, by the names of its parameters, as click reads them.

    Raises:
        ValueError: they are not understood (any more).
    """
    from flashmoe_science.cli.main import UsageError, app

    prove = typer.main.get_command(app).get_command(None, "prove")  # type: ignore[attr-defined]
    try:
        options: dict[str, Any] = prove.make_context("prove", list(command[2:])).params
    except UsageError as error:
        raise ValueError(f"the run was made by {' '.join(command)!r}, which is not understood: {error}") from None
    return options


def open_run(path: Path) -> tuple[RunWriter, Run | None]:
    """The writer of a run's file, and what the file holds: None where it is new, or where not even its header is whole.

    Raises:
        StoreError: it cannot be read or written, or another process writes it.
    """
    from flashmoe_science.store import RunWriter

    if path.exists() and _command(path) is None:
        set_aside(path)
    return RunWriter.reopen(path) if path.exists() else (RunWriter(path), None)


def set_aside(path: Path) -> None:
    """Keep a file that is begun again under a name that no other has."""
    path.rename(path.with_name(f"{path.name}.cut-{secrets.token_hex(3)}"))


def _command(path: Path) -> tuple[str, ...] | None:
    """The command in a run's header; None where the file was cut before its first row was whole."""
    from flashmoe_science.store import read_run

    if b"\n" not in path.read_bytes():
        return None
    return tuple(read_run(path).header.command)
