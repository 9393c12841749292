"""Whoever is called on a problem, candidate or rival, made callable alike: bound to its inputs, ready for a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from flashmoe_science.contract import Contract
from flashmoe_science.kernel import Config
from flashmoe_science.measure.bench import Bench, Call, Candidate
from flashmoe_science.measure.eager import user_call
from flashmoe_science.measure.trial.cases import Tensors, as_tuple
from flashmoe_science.operations import KERNELS
from flashmoe_science.problem import Problem
from flashmoe_science.records import Clock

PLAIN = "plain"  # the contract's plain maths, as a rival


class Player(Protocol):
    """One implementation on one problem."""

    def bind(self, inputs: Tensors, clock: Clock) -> Callable[[], Any]:
        """A call without arguments that computes on these very tensors."""

    def outputs(self, result: Any) -> tuple[Any, ...]:
        """What a bound call returned, as the contract has it."""


@dataclass(frozen=True, slots=True)
class Function:
    """A candidate, or a rival that is called as one. ``fn`` of None is the contract's plain maths."""

    contract: Contract
    problem: Problem
    fn: Callable[..., Any] | None

    def bind(self, inputs: Tensors, clock: Clock) -> Callable[[], Any]:
        if self.fn is None:
            return partial(self.contract.plain, self.problem, inputs)
        return partial(self.contract.call, self.fn, self.problem, inputs)

    def outputs(self, result: Any) -> tuple[Any, ...]:
        return as_tuple(result)


@dataclass(slots=True)
class Registered:
    """A kernel of the registry with a config, on its fastest path: planned once for the graph clock, as its users call it for
    the eager one."""

    contract: Contract
    problem: Problem
    bench: Bench
    candidate: Candidate
    _calls: dict[Clock, Call] = field(default_factory=dict)

    def bind(self, inputs: Tensors, clock: Clock) -> Callable[[], Any]:
        taken = self.contract.for_kernel(self.problem, inputs)
        if not self._calls:
            planned = self.candidate.planned(taken)
            self._calls = {"graph": planned, "eager": user_call(self.candidate, planned, self.problem, self.bench.gpu)}
        return partial(self._calls[clock], taken)

    def outputs(self, result: Any) -> tuple[Any, ...]:
        return as_tuple(result if isinstance(result, torch.Tensor) else self.contract.from_kernel(result))


def rival_player(contract: Contract, problem: Problem, bench: Bench, who: str, config: str) -> Player | None:
    """The rival of that name among the registry's kernels of this operation, then the contract's own; None for neither."""
    for kernel in KERNELS:
        if kernel.name == who and kernel.op == contract.name:
            return Registered(contract, problem, bench, Candidate(kernel, Config.parse(config)))
    if who == PLAIN:
        return Function(contract, problem, None)
    fn = contract.rivals().get(who)
    return None if fn is None else Function(contract, problem, fn)
