"""Check what rests on the committed records: generated pages, dispatch table and ratchet. They are judged once for all three.

python tools/check_records.py    exit 1, naming it, if one is stale, or if a record is a proven regression from what is kept
"""

from __future__ import annotations

import sys
from pathlib import Path

import dispatch_table

from flashmoe_science.judge.gate.ratchet import check, read_ratchet
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.store import read_runs, refuse_torn

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence"


def main() -> None:
    sys.path.append(str(ROOT / "docs"))
    import generate

    judged = [JudgedRun(run) for run in refuse_torn(read_runs(EVIDENCE))]
    stale = dispatch_table.main(["--check", "--evidence", str(EVIDENCE)], judged)
    checks = check(read_ratchet(EVIDENCE / "ratchet.json"), judged, judged)
    lost = [one for one in checks if one.outcome in ("regressed", "refused")]
    for one in lost:
        print(f"ratchet: {one.outcome}: {one.key.words}: {one.why}")
    if not any(one.outcome == "held" for one in checks):
        sys.exit("ratchet: no kept ratio is in the records")
    generate.main(["--check"], judged)
    if stale or lost:
        sys.exit(1)
    print("records: the dispatch table is what they support, and the ratchet holds")


if __name__ == "__main__":
    main()
