"""Whether a peer serves a problem in place of our kernel, because records have it faster (docs/design/0004). Nothing is run.

PyTorch's own attention always may; a peer from another package may if it is installed and FLASHMOE_PEERS is 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashmoe_science.dispatch.select import REACH, Basis, Decision
from flashmoe_science.dispatch.table import Entry, FasterPeer, Table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import AnyKernel, Device
from flashmoe_science.problem import Problem

ALLOWED = "FLASHMOE_PEERS"
_FEWEST = 2  # near problems that must have a peer faster: one could be an outlier


def faster_peer(
    ours: Decision,
    problem: Problem,
    gpu: Device,
    table: Table,
    peers: Sequence[AnyKernel],
    unable: Mapping[str, str] | None = None,
) -> Decision:
    """The Decision for the peer that records have faster than our kernel by more than 3%; else ``ours``.

    A record of this very problem, in its memory order, decides. Without one, all measured problems of its kind near it must
    agree, and there must be two. ``ours``: what ``select`` chose. Records of another kernel of ours do not count. ``unable``:
    peers that cannot serve the tensors at hand, with the reason.
    """
    exact = None if gpu is None else table.exact(gpu.name, problem)
    entries = [exact] if exact is not None else [] if gpu is None else _near(problem, gpu, table)
    if gpu is None or not entries or any(entry.kernel != ours.kernel for entry in entries):
        return ours
    where = f"on this problem on {gpu.product}"
    if exact is None:
        nearest = f"{entries[0].problem} on {gpu.name}"
        where = f"or more on all {len(entries)} measured problems near it, the nearest {nearest}"
    able: list[tuple[float, FasterPeer, str]] = []
    barred: list[tuple[str, str]] = []
    for kernel in peers:
        measured = [one for entry in entries for one in entry.peers if one.kernel == kernel.name]
        # In another memory order the peer would read or write otherwise.
        found = [one for one in measured if one.problem.kind() == problem.kind()]
        if any(entry.tuned for entry in entries):  # of a file that anyone may have written
            found = [one for one in found if one.config in kernel.configs(problem, gpu)]
        if len(found) < len(entries):
            continue
        ratio, first = min(one.ratio for one in found), found[0]
        speed = f"{first.backend or kernel.name}, {ratio:.2f}x ours ({ours.kernel}) {where}"
        reason = (unable or {}).get(kernel.name) or _why_not(kernel, first, problem, gpu)
        if reason is None:
            able.append((ratio, first, speed))
        else:
            barred.append((kernel.name, f"{speed}, record {entries[0].run}, but {reason}"))
    if not able:
        return replace(ours, others=(*ours.others, *barred))
    _, chosen, speed = max(able, key=lambda one: one[0])
    slower = (ours.kernel, f"slower than {chosen.kernel} in record {entries[0].run}")
    basis: Basis = "modelled" if exact is None else "measured"
    return Decision(chosen.kernel, chosen.config, speed, basis, entries[0].run, (slower, *barred, *ours.others))


def _near(problem: Problem, gpu: Gpu, table: Table) -> list[Entry]:
    """The measured problems of its kind within reach of its representative, the nearest first; none if too few."""
    kind, wanted = problem.without_layout().kind(), problem.representative()
    alike = [entry for entry in table.entries if entry.gpu == gpu.name and entry.problem.kind() == kind]
    near = [entry for entry in alike if entry.problem.distance(wanted) <= REACH]
    near.sort(key=lambda entry: (entry.problem.distance(wanted), str(entry.problem)))
    return near if len(near) >= _FEWEST else []


def _why_not(kernel: AnyKernel, peer: FasterPeer, problem: Problem, gpu: Gpu) -> str | None:
    """Why a peer must not serve a problem though it is faster; None if it may."""
    if kernel.replaces_ours == "never":
        return "it is chosen only by name"
    if kernel.replaces_ours == "if allowed" and os.environ.get(ALLOWED) != "1":
        return f"{ALLOWED}=1 is not set, which allows it"
    reason = kernel.absent() or kernel.cannot(problem, gpu)
    if reason is None and set(peer.config) != set(kernel.configs(problem, gpu)[0]):
        reason = f"it has no config {peer.config} any more"
    return reason
