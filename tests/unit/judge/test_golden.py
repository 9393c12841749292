"""What is judged from the committed runs of commit 671d7da stays as it was, byte for byte: verdicts, table, claims, ratchet.

``tests/golden/judged.json.gz`` holds the run ids, the claims and the kept ratios that were judged, and what they came to.
``PYTHONPATH=tools python tests/unit/judge/test_golden.py`` judges the same anew and writes it; the commit that does so says
what moved and why.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.dispatch.table import SCHEMA
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim, read_claims
from flashmoe_science.judge.gate.entries import entries_as_text
from flashmoe_science.judge.gate.ratchet import Kept, check
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.measure.promote import promote
from flashmoe_science.store import Run, read_runs

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "judged.json.gz"


@cache
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return content


@cache
def committed() -> list[Run]:
    return read_runs(ROOT / "evidence")


@cache
def judged_again() -> dict[str, Any]:
    return judge(golden())


def judge(of: dict[str, Any]) -> dict[str, Any]:
    """Judge the runs, claims and kept ratios of a golden file anew, and give what such a file holds."""
    runs = [run for run in committed() if run.header.run in of["runs"]]
    judged = [JudgedRun(run) for run in runs]
    stand = standing(judged)
    kept = [Kept.model_validate({**one, "accepted": one.get("accepted")}) for one in of["kept"]]
    by_key = {entry.key: entry for entry in kept}
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder, "claims.toml")
        claims.write_text(of["claims_toml"], encoding="utf-8")
        results = [judge_claim(claim, stand, judged) for claim in read_claims(claims)]
    return {
        "runs": of["runs"],
        "claims_toml": of["claims_toml"],
        "kept": of["kept"],
        "verdicts": [row.as_dict() for row in stand],
        "claims": [claim_row(one) for one in results],
        "ratchet": [one.as_dict(by_key.get(one.key)) for one in check(kept, judged, judged)],
        "table": entries_as_text(SCHEMA, promote(stand, GPUS)).splitlines(),
    }


def claim_row(one: ClaimResult) -> dict[str, Any]:
    """Every field of a result, the claim by its id and what it asks."""
    asks = {"id": one.claim.id, "text": one.claim.text, "asks": f"{one.claim.statistic} {one.claim.demand}"}
    names = ("outcome", "measured", "low", "high", "missed_by", "refuted", "problems", "worst_problem")
    values = {name: getattr(one, name) for name in names}
    return asks | values | {"runs": list(one.runs), "quick": one.quick, "why": one.why}


@pytest.mark.parametrize("part", ["verdicts", "claims", "ratchet", "table"])
def test_what_the_committed_runs_come_to_is_unchanged(part: str) -> None:
    before, now = golden()[part], judged_again()[part]
    lines = [[json.dumps(one) for one in rows] for rows in (before, now)]
    moved = [
        f"row {place}:\n- {was}\n+ {is_now}" for place, (was, is_now) in enumerate(zip(*lines, strict=False)) if was != is_now
    ]
    assert not moved, f"{len(moved)} of {len(before)} moved, the first being\n" + "\n".join(moved[:3])
    assert len(before) == len(now)


def test_every_run_of_the_golden_file_is_committed() -> None:
    assert set(golden()["runs"]) <= {run.header.run for run in committed()}


if __name__ == "__main__":
    if GOLDEN.is_file():
        asked = golden()
    else:
        asked = {
            "runs": [run.header.run for run in committed()],
            "claims_toml": (ROOT / "evidence" / "claims.toml").read_text(encoding="utf-8"),
            "kept": json.loads((ROOT / "evidence" / "ratchet.json").read_text(encoding="utf-8"))["entries"],
        }
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_bytes(gzip.compress(json.dumps(judge(asked)).encode(), 9, mtime=0))
    print(f"wrote {GOLDEN}", file=sys.stderr)
