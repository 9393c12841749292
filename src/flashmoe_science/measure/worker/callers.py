"""A function or a kernel of the package on one problem, bound to its inputs and ready to be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from flashmoe_science.contract import Contract
from flashmoe_science.kernel import AnyKernel, Config, Device
from flashmoe_science.measure.inputs import Tensors, as_tuple
from flashmoe_science.operations import is_operation, operation
from flashmoe_science.problem import Problem
from flashmoe_science.records import Clock

PLAIN = "plain"  # the contract's plain maths, as a peer
# graph, eager: as that clock times it. exam: with every output that the contract names.
Use = Clock | Literal["exam"]


@dataclass(frozen=True, slots=True)
class FunctionCaller:
    """A function that is called as the contract says. ``fn`` of None is the contract's plain maths."""

    contract: Contract
    problem: Problem
    fn: Callable[..., Any] | None

    def bind(self, inputs: Tensors, use: Use) -> Callable[[], Any]:
        """A call without arguments that computes on these very tensors."""
        if self.fn is None:
            return partial(self.contract.plain, self.problem, inputs)
        return partial(self.contract.call, self.fn, self.problem, inputs)

    def outputs(self, result: Any) -> tuple[Any, ...]:
        """What a bound call returned, as the contract has it."""
        return as_tuple(result)


@dataclass(slots=True)
class KernelCaller:
    """A kernel of the package with a config: planned once for the graph clock and the exam, as its users call it for the
    eager clock."""

    contract: Contract
    problem: Problem
    device: Device
    kernel: AnyKernel
    config: Config
    _calls: dict[Use, Callable[[Any], Any]] = field(default_factory=dict)

    def bind(self, inputs: Tensors, use: Use) -> Callable[[], Any]:
        every = self.contract.for_kernel(self.problem, inputs)
        taken = every if use == "exam" else self.contract.timed_inputs(every)
        if use not in self._calls:
            self._calls[use] = self._call(use, taken)
        return partial(self._calls[use], taken)

    def _call(self, use: Use, like: Any) -> Callable[[Any], Any]:
        by_user = None
        if use == "eager":
            by_user = self.contract.user_call(self.kernel, self.config, self.problem, self.device)
        return by_user or self.contract.planned(self.kernel, self.config, like)

    @property
    def has_user_call(self) -> bool:
        """Whether a public function would run this very kernel and config."""
        return self.contract.user_call(self.kernel, self.config, self.problem, self.device) is not None

    def outputs(self, result: Any) -> tuple[Any, ...]:
        return self.contract.from_kernel(result)


Caller = FunctionCaller | KernelCaller


def caller_named(contract: Contract, problem: Problem, device: Device, name: str, config: str) -> Caller | None:
    """The implementation of that name: a kernel of the contract's operation, one of its ``rivals``, its plain maths."""
    for kernel in operation(contract.name).kernels() if is_operation(contract.name) else ():
        if kernel.name == name:
            return KernelCaller(contract, problem, device, kernel, Config.parse(config))
    if name == PLAIN:
        return FunctionCaller(contract, problem, None)
    fn = contract.rivals().get(name)
    return None if fn is None else FunctionCaller(contract, problem, fn)
