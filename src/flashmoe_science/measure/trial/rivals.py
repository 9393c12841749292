"""Whom a candidate is compared with: kernels of the registry, the contract's own rivals, other candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.contract import ATTENTION
from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.kernel import Config, Device, Kernel, Launch
from flashmoe_science.measure.choice import ALL, ON_CPU, SLOW
from flashmoe_science.measure.trial.players import PLAIN
from flashmoe_science.operations import KERNELS
from flashmoe_science.problem import Problem
from flashmoe_science.records import Origin


@dataclass(frozen=True, slots=True)
class Rival:
    """One of them. ``kernel`` is None for what the registry does not have."""

    who: str
    kernel: Kernel | None = None

    @property
    def origin(self) -> Origin:
        if self.kernel is not None:
            return self.kernel.origin
        return "candidate" if ":" in self.who else "peer"

    def cannot(self, problem: Problem, device: Device) -> str | None:
        """Why it takes no part, in words; None if it does."""
        if self.kernel is None:
            return None
        return self.kernel.absent() or self.kernel.supports(problem, device)

    def promised(self, problem: Problem, config: str, device: Device) -> tuple[Launch, ...]:
        """What its call launches, as far as that is promised; nothing is of what the registry does not have."""
        if self.kernel is None or device is None:
            return ()
        return self.kernel.launches(problem, Config.parse(config), device)

    def config(self, problem: Problem, device: Device) -> str:
        """The config that it is measured with: what an automatic choice would take for ours, a peer's first."""
        if self.kernel is None:
            return ""
        if self.kernel.origin == "ours":
            return str(select(problem, device, committed_table(), [self.kernel], requested=self.kernel).config)
        return str(self.kernel.configs(problem, device)[0])


def rivals_of(op: str, own: Sequence[str], named: Sequence[str], every: bool, device: Device) -> tuple[Rival, ...]:
    """The rivals of a candidate held to the contract of ``op``, whose own rivals are ``own``.

    ``named`` are what --against named, "all" for every peer; nothing named gives the peers that are worth their time.

    Raises:
        ValueError: a name that nobody has for this operation.
    """
    registered = {kernel.name: kernel for kernel in KERNELS if kernel.op == op}
    known = {**{name: Rival(name) for name in (*own, PLAIN)}, **{name: Rival(name, one) for name, one in registered.items()}}
    if named and ALL not in named:
        for name in named:
            if name not in known and ":" not in name:
                raise ValueError(
                    f"--against is {name!r}; for {op} it must be one of {', '.join(known)}, all, or module:function"
                )
        return tuple(known.get(name, Rival(name)) for name in dict.fromkeys(named))
    peers = [kernel for kernel in registered.values() if kernel.origin == "peer"]
    if not named and not every:
        attention_here = device is None and op == ATTENTION
        peers = [one for one in peers if (one.name in ON_CPU if attention_here else one.name not in SLOW)]
    chosen = [*(Rival(name) for name in own), *(Rival(one.name, one) for one in peers)]
    return tuple(chosen) or (Rival(PLAIN),)
