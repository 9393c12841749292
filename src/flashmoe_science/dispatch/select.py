"""Which kernel serves a problem on a GPU, and why. Pure: no device is touched and nothing is compiled.

In order: the kernel asked for by name; the one measured fastest on this very problem; the one measured fastest on a near
problem, with its config if the tiles are the same and the kernel still offers it; our first that supports and suits it; the
framework's own. If the very problem was not measured, its representative decides, so that problems of one class of lengths
share a choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flashmoe_science.dispatch.table import Entry, Table
from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.kernel import AnyKernel, CannotServe, Config, Device
from flashmoe_science.problem import Problem

# measured: a record of this problem on this GPU. modelled: a record of a near problem, or no record but the kernel's own
# first guess. requested: asked for by name. required: nothing else can serve the call.
Basis = Literal["measured", "modelled", "requested", "required"]

REACH = 1.0  # log2 of the factor allowed in each of batch x heads, queries and keys for a record to apply to a problem


@dataclass(frozen=True, slots=True)
class Decision:
    """The kernel and config that serve a problem, and why. ``record`` names the run behind the choice, if any; ``others`` are
    the kernels that were considered and not chosen, each with the reason."""

    kernel: str
    config: Config
    reason: str
    basis: Basis
    record: str | None = None
    others: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        head = f"{self.kernel}({self.config})" if self.config else self.kernel
        record = f", record {self.record}" if self.record else ""
        lines = [f"{head}: {self.reason} [{self.basis}{record}]"]
        lines += [f"  not {name}: {why}" for name, why in self.others]
        return "\n".join(lines)


def select(
    problem: Problem,
    gpu: Device,
    table: Table,
    kernels: Sequence[AnyKernel],
    fallback: str | None,
    requested: AnyKernel | None = None,
    unable: Mapping[str, str] | None = None,
) -> Decision:
    """Decide which of ``kernels`` serves ``problem``.

    Args:
        gpu: None for the CPU.
        kernels: the candidates of an automatic choice, the preferred first.
        fallback: name of the framework's own kernel, which serves what none of ``kernels`` can; None for none.
        requested: serve by this kernel or not at all.
        unable: kernels that cannot take the call's tensors, with the reason (CannotServe).

    Raises:
        CannotServe: ``requested`` cannot serve the problem, or nothing can; the message has the reason and what could.
    """
    reasons = dict(unable or {})
    for kernel in kernels:
        reason = kernel.cannot(problem, gpu)
        if reason is not None:
            reasons.setdefault(kernel.name, reason)
    able = [kernel for kernel in kernels if kernel.name not in reasons]
    if requested is not None:
        reason = requested.absent() or reasons.get(requested.name) or requested.cannot(problem, gpu)
        if reason is None:
            return _requested(problem, gpu, table, requested)
        could = [kernel.name for kernel in able] + ([fallback] if fallback else [])
        can = ", ".join(name for name in could if name != requested.name) or "no other"
        raise CannotServe(f"kernel {requested.name!r} cannot serve {problem} on {_place(gpu)}: {reason}; {can} can")
    others = tuple(reasons.items())
    if not able:
        if fallback is None:
            raise CannotServe(f"no kernel here serves {problem}: {'; '.join(f'{name}: {why}' for name, why in others)}")
        where = "tensors on the CPU" if gpu is None else "what none of our kernels can"
        return Decision(fallback, Config(), f"PyTorch's own operators serve {where}", "required", None, others)
    found = None if gpu is None else _by_record(problem, gpu, table, able)
    if found is not None:
        faster = f"{found.kernel} is the fastest in record {found.record}"
        return replace(found, others=(*((kernel.name, faster) for kernel in able if kernel.name != found.kernel), *others))
    problem = problem.representative()
    # Stable: else as they are listed.
    first, *rest = able if gpu is None else sorted(able, key=lambda kernel: not kernel.suits(problem, gpu))
    later = tuple((kernel.name, f"{first.name} is the better guess where nothing was measured") for kernel in rest)
    reason = f"no record of a problem like it on {_place(gpu)}; the first kernel that suits it, with its first config"
    return Decision(first.name, first.configs(problem, gpu)[0], reason, "modelled", None, (*later, *others))


def at_lengths(decision: Decision, problem: Problem, gpu: Device, kernels: Sequence[AnyKernel]) -> Decision:
    """The decision, for people to read: with the config of a launch at the problem's very lengths (``Kernel.exact``)."""
    for kernel in kernels:
        if kernel.name == decision.kernel and gpu is not None:
            return replace(decision, config=kernel.exact(problem, decision.config, gpu))
    return decision


def _by_record(problem: Problem, gpu: Gpu, table: Table, able: Sequence[AnyKernel]) -> Decision | None:
    """The decision that records support among the kernels in ``able``: by the ``nearest`` one. It gives its config where the
    tiles are the same, unless it only confirms the kernel's own rule, which then decides here too."""
    entry = nearest(problem, gpu, table, able)
    if entry is None:
        return None
    kernel = next(one for one in able if one.name == entry.kernel)
    exact = entry is table.exact(gpu.name, problem)
    if exact:
        reason = f"the fastest of ours on this problem on {gpu.product}, {_measured(entry)}"
    else:
        problem = problem.representative()
        reason = f"the fastest of ours on the nearest measured problem, {entry.problem} on {entry.gpu}, {_measured(entry)}"
    config, measured, offered = kernel.configs(problem, gpu)[0], entry.config, None
    if not entry.tuned:
        there = gpu_named(entry.gpu)
        offered = kernel.configs(entry.problem, there)
        if measured == kernel.exact(entry.problem, offered[0], there):
            measured = offered[0]
    if offered is not None and measured not in offered:
        own = "that of the record is not offered any more"
    elif not exact and entry.problem.tile_key() != problem.tile_key():
        own = "the tiles differ"
    elif offered is not None and not exact and measured == offered[0] != config:
        own = "that of the record is its first one there"
    else:
        return Decision(entry.kernel, measured, reason, "measured" if exact else "modelled", entry.run)
    return Decision(entry.kernel, config, f"{reason}; its own first config, as {own}", "modelled", entry.run)


def nearest(problem: Problem, gpu: Gpu, table: Table, able: Sequence[AnyKernel]) -> Entry | None:
    """The entry of the kernels in ``able`` for this problem, else for the nearest one within reach; with other tiles only if
    none has the same."""
    kernels = {kernel.name: kernel for kernel in able}
    exact = table.exact(gpu.name, problem)
    if exact is not None and _usable(exact, kernels, gpu):
        return exact
    problem = problem.representative()
    near = [entry for entry in table.entries if _alike(entry, problem, gpu) and _usable(entry, kernels, gpu)]
    same_tiles = [entry for entry in near if entry.problem.tile_key() == problem.tile_key()]
    near = [entry for entry in near if kernels[entry.kernel].suits(problem, gpu)]  # with other tiles, if it suits
    for entries in (same_tiles, near):
        # Another GPU of the architecture counts only where this one has nothing as near; the text breaks ties for good.
        entry = min(entries, key=lambda e: (e.problem.distance(problem), e.gpu != gpu.name, str(e.problem)), default=None)
        if entry is not None and entry.problem.distance(problem) <= REACH:
            return entry
    return None


def _requested(problem: Problem, gpu: Device, table: Table, kernel: AnyKernel) -> Decision:
    found = _by_record(problem, gpu, table, (kernel,)) if gpu is not None else None
    if found is not None:
        return replace(found, reason=f"asked for by name; config by {found.reason}", basis="requested")
    config = kernel.configs(problem.representative(), gpu)[0]
    return Decision(kernel.name, config, "asked for by name; its first config", "requested")


def _place(gpu: Device) -> str:
    return "the CPU" if gpu is None else gpu.product


def _measured(entry: Entry) -> str:
    beside = f", {entry.ratio:.2f}x the speed of {entry.rival}" if entry.rival and entry.ratio else ""
    return f"{entry.time_ns / 1000:.2f} us{beside}{', tuned on this machine' if entry.tuned else ''}"


def _usable(entry: Entry, kernels: Mapping[str, AnyKernel], gpu: Gpu) -> bool:
    """Whether the kernel is one of these and still has such configs: a table may be older than its kernels. A tuned entry comes
    from a file that anyone may have written: the kernel must offer this very config for the problem."""
    kernel = kernels.get(entry.kernel)
    if kernel is None:
        return False
    if entry.tuned:
        return kernel.cannot(entry.problem, gpu) is None and entry.config in kernel.configs(entry.problem, gpu)
    return set(entry.config) == set(kernel.configs(entry.problem, gpu_named(entry.gpu))[0])


def _alike(entry: Entry, problem: Problem, gpu: Gpu) -> bool:
    """Whether a record applies to such a problem: same features and GPU architecture; a tuned record needs this very GPU."""
    if entry.problem.distance(problem) == math.inf:
        return False
    return entry.gpu == gpu.name if entry.tuned else gpu_named(entry.gpu).arch == gpu.arch
