"""Records in, entries of a dispatch table out: the fastest of our kernels for each problem, and the faster peers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import Table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.judge.standing import JudgedRun, is_drawn, latest, standing
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.kernel import AnyKernel, Config
from flashmoe_science.operations import is_operation, operation, parse_problem

LEAST_LEAD = 1.03  # a peer's, by all of the ratio's interval

Cards = Mapping[str, Gpu]  # by name, those of which records count
Peers = Callable[[Verdict], list[dict[str, Any]]]


def entries_of(judged: Sequence[JudgedRun], cards: Cards) -> list[dict[str, Any]]:
    """The entries that runs on these cards support, peers included."""
    runs = {one.run.header.run: one for one in judged}
    return promote(standing(judged), cards, lambda row: faster_peers(runs[row.run], row, cards))


def promote(rows: Iterable[Verdict], cards: Cards, faster: Peers = lambda row: []) -> list[dict[str, Any]]:
    """The entries that verdicts support. ``faster`` gives the peers that were faster than the kernel of a verdict.

    Only the graph clock counts: it is the kernel's own time. Where several suites or layouts measured a kernel on one problem,
    the run that counts is used, also where it refuses the kernel. Problems drawn at random do not enter: no later run measures
    them again. Nor do problems on which the kernel that is chosen without a record was not measured: it may be newer than the
    record, or excluded by --kernel, and the fastest. ``ratio`` is the best peer's time over the kernel's, None without a peer
    beside it."""
    able = (row for row in rows if row.of_ours and row.clock == "graph" and row.gpu in cards and not is_drawn(row.suite))
    able = (row for row in able if is_operation(row.op))  # of one GPU
    counted = latest(able, lambda row: (row.gpu, str(parse_problem(row.problem).without_layout()), row.kernel))
    best: dict[tuple[str, str], Verdict] = {}
    for (gpu, problem, _), row in sorted(counted.items(), key=lambda item: item[1].time_ns or 0.0):
        if row.verdict != "refused" and row.time_ns and (gpu, problem, first_guess(problem, cards[gpu])) in counted:
            best.setdefault((gpu, problem), row)
    ordered = sorted(best.items(), key=lambda item: (item[0][0], parse_problem(item[0][1]).order()))
    return [_entry(gpu, problem, row, faster(row)) for (gpu, problem), row in ordered]


def first_guess(problem: str, gpu: Gpu) -> str:
    """The kernel that is chosen where there is no record."""
    parsed = parse_problem(problem)
    op = operation(parsed.op)
    return select(parsed, gpu, Table(()), op.ours(), op.fallback()).kernel


def faster_peers(judged: JudgedRun, ours: Verdict, cards: Cards) -> list[dict[str, Any]]:
    """Peers that an automatic choice may take and that were faster in the run than ``ours``, its best kernel, by more than 3%,
    the fastest first. None for a problem with features, which only kernels that take them serve."""
    problem = parse_problem(ours.problem)
    features = getattr(problem, "features", None)
    if features is not None and features.words():
        return []
    peers = operation(problem.op).peers()
    able = {peer.name for peer in peers if peer.replaces_ours != "never"}
    conditions = (ours.problem, ours.clock, ours.cache, ours.kernel, ours.config)
    rows = [row for row in judged.verdicts if (row.problem, row.clock, row.cache, row.rival, row.rival_config) == conditions]
    rows = [row for row in rows if row.kernel in able and row.low is not None and row.low > LEAST_LEAD]
    return [
        {"kernel": row.kernel, "config": row.config, "ratio": round(row.ratio or 0.0, 3), "problem": row.problem}
        | _backend(judged, row, peers, cards[row.gpu])
        for row in sorted(rows, key=lambda row: -(row.ratio or 0.0))
    ]


def _backend(judged: JudgedRun, row: Verdict, peers: Sequence[AnyKernel], gpu: Gpu) -> dict[str, str]:
    """The backend that PyTorch chose, where it chose by itself, by the launch that the run saw."""
    backends = [peer for peer in peers if row.kernel == "sdpa" and peer.name.startswith("sdpa_")]
    for seen in judged.launches(row):
        for peer in backends:
            promised = peer.launches(parse_problem(row.problem), Config(), gpu)
            if any(re.search(one.name, seen.name) for one in promised):
                return {"backend": peer.about}
    return {}


def _entry(gpu: str, problem: str, row: Verdict, faster: list[dict[str, Any]]) -> dict[str, Any]:
    entry = {
        "gpu": gpu,
        "problem": problem,
        "kernel": row.kernel,
        "config": row.config,
        "rival": row.rival,
        "ratio": None if row.ratio is None else round(row.ratio, 3),
        "time_ns": round(row.time_ns or 0),
        "run": row.run,
    }
    return entry | ({"peers": faster} if faster else {})
