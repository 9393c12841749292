"""Where records lie, and what a command that shows them needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flashmoe_science.judge.gate.claims import ClaimResult
    from flashmoe_science.judge.verdicts import Verdict
    from flashmoe_science.store import Run

DEFAULT = Path("evidence")
CLAIMS = "claims.toml"


def runs_under(folder: Path, option: str = "--evidence") -> list[Run]:
    """Every run under a folder. A torn last line of one, which a killed run leaves, is set aside with a warning on stderr.

    Raises:
        StoreError: no such folder, or a file in it that is from a newer schema or no record. One line.
    """
    from flashmoe_science.store import StoreError, read_runs

    if not folder.is_dir():
        if folder == DEFAULT and not folder.exists():
            raise StoreError(
                f"there is no folder {str(folder)!r} here; give {option} a folder that holds run records (*.jsonl)"
            )
        raise StoreError(f"{option} is {str(folder)!r}, which is not a folder; give one that holds run records (*.jsonl)")
    runs = read_runs(folder)
    for run in runs:
        if run.torn:
            typer.echo(
                f"set aside: {run.torn}; the rows before it count, to go on: flashmoe prove --resume {run.path}", err=True
            )
    return runs


def machine_named(gpu: str | None, runs: Sequence[Run]) -> str | None:
    """The short name of a machine: as the runs have it, else as the table of GPUs does; None for none.

    Raises:
        ValueError: a GPU that neither knows.
    """
    from flashmoe_science.hardware.gpus import gpu_named
    from flashmoe_science.judge.trust import gpu_name

    known = {gpu_name(run.header.environment) for run in runs} | {"cpu"}
    return gpu if gpu is None or gpu in known else gpu_named(gpu).name


def claims_under(folder: Path, verdicts: Sequence[Verdict], runs: Sequence[Run]) -> list[ClaimResult]:
    """The folder's claims held against the verdicts on these runs; none where it makes no claims.

    Raises:
        ClaimError: a claims file that cannot be read.
    """
    from flashmoe_science.judge.gate.claims import judge_claims
    from flashmoe_science.judge.standing import JudgedRun

    path = folder / CLAIMS
    return judge_claims(verdicts, path, [JudgedRun(run) for run in runs]) if path.is_file() else []
