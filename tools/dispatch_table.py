"""Records in, the content of dispatch/table.json out: the fastest of our kernels for each problem, and the faster peers.

python tools/dispatch_table.py            write the table from the committed records
python tools/dispatch_table.py --check    only compare
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmoe_science.dispatch.table import PATH, SCHEMA
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.gate.entries import entries_as_text
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.measure.promote import entries_of
from flashmoe_science.store import read_runs, refuse_torn


def main(arguments: Sequence[str] | None = None, judged: Sequence[JudgedRun] = ()) -> int:
    """Write the table, or say whether it is what the records support. Returns 0, 1 (it is not) or 2 (it could not run).

    ``judged``: the runs of the folder, where they were read."""
    parser = argparse.ArgumentParser(prog="tools/dispatch_table.py", description=__doc__.splitlines()[0])
    parser.add_argument("--evidence", type=Path, default=Path("evidence"), help="folder with run records (evidence)")
    parser.add_argument("--table", type=Path, default=PATH, help="the table to write (the package's)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the table is not the records'")
    options = parser.parse_args(arguments)
    try:
        judged = judged or [JudgedRun(run) for run in refuse_torn(read_runs(options.evidence))]
        text = entries_as_text(SCHEMA, entries_of(judged, GPUS))
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


if __name__ == "__main__":
    sys.exit(main())
