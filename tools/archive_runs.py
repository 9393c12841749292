"""Move the runs that nothing rests on from evidence/runs to evidence/archive, gzipped: no current verdict, no claim and no
entry of the dispatch table is theirs (docs/design/0010). They are read and judged as before, and come back with gunzip.

python tools/archive_runs.py            move them
python tools/archive_runs.py --check    only name them; exit 1 where there are any
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.gate.claims import judge_claim, read_claims
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.measure.promote import entries_of
from flashmoe_science.store import read_runs, refuse_torn

EVIDENCE = Path("evidence")


def at_rest(judged: Sequence[JudgedRun], claims: Path) -> list[Path]:
    """The files of the runs that nothing rests on."""
    verdicts = standing(judged)
    rests_on = {row.run for row in verdicts} | {entry["run"] for entry in entries_of(judged, GPUS)}
    rests_on.update(run for claim in read_claims(claims) for run in judge_claim(claim, verdicts, judged).runs)
    return [one.run.path for one in judged if one.run.header.run not in rests_on and one.run.path]


def archive(path: Path, runs: Path, folder: Path) -> Path:
    """Put a gzipped copy under ``folder``, at the place that the file has under ``runs``; then the file goes. Raises
    ValueError: the copy does not hold the same bytes."""
    content, to = path.read_bytes(), folder / f"{path.relative_to(runs)}.gz"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(gzip.compress(content, 9, mtime=0))
    if hashlib.sha256(gzip.decompress(to.read_bytes())).digest() != hashlib.sha256(content).digest():
        raise ValueError(f"{to} does not hold what {path} does")
    path.unlink()
    return to


def main(arguments: Sequence[str]) -> int:
    judged = [JudgedRun(run) for run in refuse_torn(read_runs(EVIDENCE))]
    runs = EVIDENCE / "runs"
    found = [path for path in at_rest(judged, EVIDENCE / "claims.toml") if path.is_relative_to(runs)]
    for path in found:
        print(path if arguments else archive(path, runs, EVIDENCE / "archive"))
    return int(bool(arguments) and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
