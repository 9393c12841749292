"""Record files in evidence/: a tool's measurements and the machine they were made on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashmoe_science.measure.bench import bench_here, commit, environment, source_digest


def write_record(path: Path, found: dict[str, Any]) -> None:
    """Write ``found`` as JSON after the commit, the digest of the source and the machine."""
    where = {
        "commit": commit(),
        "source_digest": source_digest(),
        "environment": environment(bench_here()).model_dump(mode="json"),
    }
    path.write_text(json.dumps(where | found, indent=1) + "\n", encoding="utf-8")
