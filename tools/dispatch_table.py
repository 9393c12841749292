"""Verdicts in, the content of dispatch/table.json out: for each problem the fastest of our kernels that can be believed.

python tools/dispatch_table.py            write the table from the committed records
python tools/dispatch_table.py --check    only compare
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flashmoe_science
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.gate.entries import entries_as_text
from flashmoe_science.judge.standing import is_drawn, latest, verdicts
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.store import read_runs, refuse_torn

SCHEMA = 1
TABLE = Path(flashmoe_science.__file__).parent / "dispatch" / "table.json"


def promote(rows: Iterable[Verdict]) -> dict[str, Any]:
    """The dispatch table that verdicts support.

    Only the graph clock counts: it is the kernel's own time. Of a kernel that several suites or layouts measured on one
    problem, the run that counts is taken, also where it refuses. Problems drawn at random do not enter: no later run measures
    them again. ``ratio`` is the best peer's time over the kernel's, None where none was beside it."""
    able = (row for row in rows if row.of_ours and row.clock == "graph" and row.gpu in GPUS and not is_drawn(row.suite))
    counted = latest(able, lambda row: (row.gpu, str(parse_problem(row.problem).without_layout()), row.kernel))
    best: dict[tuple[str, str], Verdict] = {}
    for (gpu, problem, _), row in counted.items():
        if row.verdict == "refused" or row.time_ns is None:
            continue
        if (gpu, problem) not in best or row.time_ns < (best[gpu, problem].time_ns or 0):
            best[gpu, problem] = row
    ordered = sorted(best.items(), key=lambda item: (item[0][0], parse_problem(item[0][1]).order()))
    return {"schema": SCHEMA, "entries": [_entry(gpu, problem, row) for (gpu, problem), row in ordered]}


def as_text(table: dict[str, Any]) -> str:
    """The table as it is committed."""
    return entries_as_text(table["schema"], table["entries"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or say whether it is what the records support. Returns 0, 1 (it is not) or 2 (it could not run)."""
    parser = argparse.ArgumentParser(prog="tools/dispatch_table.py", description=__doc__.splitlines()[0])
    parser.add_argument("--evidence", type=Path, default=Path("evidence"), help="folder with run records (evidence)")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to write (the package's)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the table is not the records'")
    options = parser.parse_args(arguments)
    try:
        text = as_text(promote(verdicts(refuse_torn(read_runs(options.evidence)))))
        if not options.check:
            options.table.write_text(text, encoding="utf-8")
            return 0
        stale = not options.table.is_file() or options.table.read_text(encoding="utf-8") != text
    except (ValueError, OSError) as error:
        print(f"dispatch_table: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if stale:
        print(f"dispatch_table: {options.table} is not what the records support; run {parser.prog}", file=sys.stderr)
    return int(stale)


def _entry(gpu: str, problem: str, row: Verdict) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "problem": problem,
        "kernel": row.kernel,
        "config": row.config,
        "ratio": None if row.ratio is None else round(row.ratio, 3),
        "time_ns": round(row.time_ns or 0),
        "run": row.run,
    }


if __name__ == "__main__":
    sys.exit(main())
