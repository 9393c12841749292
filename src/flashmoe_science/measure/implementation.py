"""The implementations that a run times: kernels of the package, peers, and functions that a user brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.kernel import AnyKernel, Config, Device, Launch
from flashmoe_science.measure.worker.callers import PLAIN
from flashmoe_science.operations import is_operation, operation
from flashmoe_science.problem import Problem
from flashmoe_science.records import Origin

ALL = "all"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One of them. ``who`` is its name for a worker, empty for the function that the worker has loaded; ``kernel`` is None for
    what no operation of the package lists."""

    name: str
    who: str
    kernel: AnyKernel | None = None

    @property
    def origin(self) -> Origin:
        if self.kernel is not None:
            return self.kernel.origin
        return "candidate" if ":" in self.name else "peer"

    def cannot(self, problem: Problem, device: Device) -> str | None:
        """Why it takes no part on a problem, in words; None if it does."""
        if self.kernel is None:
            return None
        return self.kernel.absent() or self.kernel.cannot(problem, device)

    def promised(self, problem: Problem, config: str, device: Device) -> tuple[Launch, ...]:
        """What its call launches, as far as that is promised."""
        if self.kernel is None or device is None:
            return ()
        return self.kernel.launches(problem, Config.parse(config), device)

    def workspace(self, problem: Problem, config: str) -> int | None:
        """Bytes of device memory that one call may take beyond its results; None where nothing is promised (a peer)."""
        if self.kernel is None or self.kernel.origin != "ours":
            return None
        return self.kernel.workspace(problem, Config.parse(config))

    def configs(self, problem: Problem, device: Device, most: int) -> tuple[str, ...]:
        """The configs to try, the best guess first."""
        if self.kernel is None:
            return ("",)
        return tuple(str(config) for config in self.kernel.configs(problem, device)[:most])

    def chosen_config(self, problem: Problem, device: Device) -> str:
        """The config that an automatic choice would take."""
        if self.kernel is None:
            return ""
        if self.kernel.origin == "ours":
            return str(select(problem, device, committed_table(), [self.kernel], None, requested=self.kernel).config)
        return str(self.kernel.configs(problem, device)[0])


@dataclass(frozen=True, slots=True)
class Entry:
    """An implementation with the config that it is measured with."""

    implementation: Implementation
    config: str

    @property
    def name(self) -> str:
        return self.implementation.name

    @property
    def who(self) -> str:
        return self.implementation.who

    def __str__(self) -> str:
        return f"{self.name} ({self.config})" if self.config else self.name


def of_kernel(kernel: AnyKernel) -> Implementation:
    return Implementation(kernel.name, kernel.name, kernel)


def of_function(spec: str) -> Implementation:
    """The function that a worker has loaded."""
    return Implementation(spec, "")


def rivals_of(
    op: str, own: Sequence[str], named: Sequence[str], every: bool, device: Device, subjects: Sequence[Implementation]
) -> tuple[Implementation, ...]:
    """What the subjects are compared with.

    Args:
        op: name of the contract; own: names of the contract's own ``rivals``.
        named: what --against named, "all" for every peer; nothing named gives the peers that are worth their time, the
            contract's own first, and the plain maths where there are none.
        every: take the slow peers too.

    Raises:
        ValueError: a name that nothing has for this operation, or a peer that was named and is not installed.
    """
    kernels = {kernel.name: kernel for kernel in (operation(op).kernels() if is_operation(op) else ())}
    known = {name: Implementation(name, name) for name in (*own, PLAIN)}
    known |= {name: of_kernel(kernel) for name, kernel in kernels.items()}
    if named and ALL not in named:
        chosen = [_named(name, op, known) for name in dict.fromkeys(named)]
    else:
        peers = [one for one in kernels.values() if one.origin == "peer"]
        if not (every or named):
            peers = [one for one in peers if (one.on_cpu if device is None else not one.slow)]
        chosen = [*(known[name] for name in own), *(of_kernel(one) for one in peers)] or [known[PLAIN]]
    taken = {one.name for one in subjects}
    return tuple(one for one in chosen if one.name not in taken)


def _named(name: str, op: str, known: dict[str, Implementation]) -> Implementation:
    if name not in known and ":" not in name:
        raise ValueError(f"--against is {name!r}; for {op} it must be one of {', '.join(known)}, all, or module:function")
    found = known.get(name, Implementation(name, name))
    absent = None if found.kernel is None else found.kernel.absent()
    if absent is not None:
        raise ValueError(f"kernel {name!r} cannot be measured here: {absent}")
    return found
