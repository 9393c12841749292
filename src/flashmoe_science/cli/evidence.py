"""Where records lie, and what a command that shows them needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoe_science.judge.claims import ClaimResult
    from flashmoe_science.judge.verdict import Verdict
    from flashmoe_science.store import Run

DEFAULT = Path("evidence")
CLAIMS = "claims.toml"


def runs_under(folder: Path) -> list[Run]:
    """Every run under a folder, all of them whole.

    Raises:
        StoreError: no such folder, or a file in it that is torn, from a newer schema or no record. One line.
    """
    from flashmoe_science.store import StoreError, read_runs, refuse_torn

    if not folder.is_dir():
        raise StoreError(f"--evidence is {str(folder)!r}, which is not a folder; give one that holds run records (*.jsonl)")
    return refuse_torn(read_runs(folder))


def claims_under(folder: Path, verdicts: Sequence[Verdict], runs: Sequence[Run]) -> list[ClaimResult]:
    """The folder's claims held against the verdicts on these runs; none where it makes no claims.

    Raises:
        ClaimError: a claims file that cannot be read.
    """
    from flashmoe_science.judge.claims import judge_claims

    path = folder / CLAIMS
    return judge_claims(verdicts, path, runs) if path.is_file() else []
