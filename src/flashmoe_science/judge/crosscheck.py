"""Does our graph clock agree with other tools? Held to 3%, like with like: the same kernel, tensors, process and cache."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.records import Cache, CrossCheckRow
from flashmoe_science.store import Run

TOLERANCE = 0.03
Said = Literal["agrees", "differs", "undecided", "no number"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """One kernel by our clock and by another tool, in nanoseconds a call.

    ``difference`` is the tool's time over ours, less 1. ``drift`` is how far our own clock moved while the tool ran: our median
    after it over our median before it, less 1. ``why`` says what is lacking where nothing is decided.
    """

    run: str
    gpu: str
    problem: str
    kernel: str
    cache: Cache
    tool: str
    tool_version: str
    method: str
    said: Said
    time_ns: float | None = None
    ours_ns: float | None = None
    difference: float | None = None
    drift: float | None = None
    why: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def agreements(runs: Sequence[Run]) -> list[Agreement]:
    """Every comparison that stands: for a GPU, problem, tool and cache, the latest run's, in the order of the records."""
    latest: dict[tuple[str, str, str, Cache], Agreement] = {}
    for run in sorted(runs, key=lambda run: (run.header.started, run.header.run)):
        gpu = gpu_name(run.header.environment)
        for row in run.rows:
            if isinstance(row, CrossCheckRow):
                key = (gpu, row.problem, row.tool, row.cache)
                latest.pop(key, None)
                latest[key] = agreement(gpu, row)
    return list(latest.values())


def agreement(gpu: str, row: CrossCheckRow) -> Agreement:
    """Hold one comparison to the tolerance. It is undecided where our own clock drifted by more than that meanwhile."""
    found = Agreement(
        run=row.run,
        gpu=gpu,
        problem=row.problem,
        kernel=row.kernel,
        cache=row.cache,
        tool=row.tool,
        tool_version=row.tool_version,
        method=row.method,
        said="no number",
    )
    half = len(row.ours) // 2
    if row.time_ns is None or half == 0:
        return replace(found, why=row.reason or "the tool, or our clock beside it, gave no time")
    ours = statistics.median(row.ours)
    before, after = statistics.median(row.ours[:half]), statistics.median(row.ours[half:])
    if not min(row.time_ns, before, after) > 0:
        return replace(found, why="a time is zero")
    difference, drift = row.time_ns / ours - 1, after / before - 1
    found = replace(found, time_ns=row.time_ns, ours_ns=ours, difference=difference, drift=drift)
    if abs(drift) > TOLERANCE:
        return replace(found, said="undecided", why=f"our own clock moved by {drift:+.1%} while the tool ran")
    if abs(difference) > TOLERANCE:
        return replace(found, said="differs", why=f"{difference:+.1%}, more than {TOLERANCE:.0%}")
    return replace(found, said="agrees")


def tools_that_agree(found: Iterable[Agreement]) -> dict[str, tuple[int, int]]:
    """For each tool, on how many of its problems every comparison agrees, and how many problems it was given."""
    by_problem: dict[str, dict[str, bool]] = {}
    for one in found:
        problems = by_problem.setdefault(one.tool, {})
        problems[one.problem] = problems.get(one.problem, True) and one.said == "agrees"
    return {tool: (sum(problems.values()), len(problems)) for tool, problems in by_problem.items()}
