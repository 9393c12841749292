"""A function or a kernel of the package on one problem, bound to its inputs and ready to be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from flashmoe_science.contract import Contract
from flashmoe_science.kernel import AnyKernel, Config, Device
from flashmoe_science.measure.child import OF_KERNEL
from flashmoe_science.measure.guards import FOR_GUARDS
from flashmoe_science.measure.inputs import Tensors, as_tuple
from flashmoe_science.operations import is_operation, operation
from flashmoe_science.problem import Problem
from flashmoe_science.records import Clock

PLAIN = "plain"  # the contract's plain maths, as a peer
# What a call is bound for: "graph" and "eager" as that clock times it, "exam" with every output that the contract names.
Use = Clock | Literal["exam"]


@dataclass(frozen=True, slots=True)
class FunctionCaller:
    """A function, called through the contract. ``fn`` of None is the contract's plain maths."""

    contract: Contract
    problem: Problem
    fn: Callable[..., Any] | None

    def bind(self, inputs: Tensors, use: Use) -> Callable[[], Any]:
        """A call without arguments that computes on these tensors."""
        called = self.contract.plain if self.fn is None else partial(self.contract.call, self.fn)
        call = partial(called, self.problem, inputs)
        return partial(_by_kernel, call) if use == "exam" else call

    def outputs(self, result: Any) -> tuple[Any, ...]:
        """The result of a bound call as a tuple in the contract's order."""
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
        return self.bind_given(self.contract.for_kernel(self.problem, self.loaded(inputs)), use)

    def loaded(self, inputs: Tensors) -> Tensors:
        """The inputs with the kernel's work at load done, anew at every call."""
        return inputs if self.kernel.load is None else _by_kernel(self.kernel.load, self.problem, inputs)

    def bind_given(self, given: Any, use: Use) -> Callable[[], Any]:
        """A call on what the contract's ``for_kernel`` gave."""
        tensors = given if use == "exam" else self.contract.timed_inputs(given)
        if use not in self._calls:
            by_user = self.user_call() if use == "eager" else None
            self._calls[use] = by_user or _by_kernel(self.contract.planned, self.kernel, self.config, tensors)
        call = partial(self._calls[use], tensors)
        return partial(_by_kernel, call) if use == "exam" else call

    def user_call(self) -> Callable[[Any], Any] | None:
        """The public function, where it would run this very kernel and config."""
        return self.contract.user_call(self.kernel, self.config, self.problem, self.device)

    def outputs(self, result: Any) -> tuple[Any, ...]:
        return self.contract.from_kernel(result)


Caller = FunctionCaller | KernelCaller
T = TypeVar("T")


def _by_kernel(call: Callable[..., T], *given: Any) -> T:
    """The result of a kernel's own code. If memory runs out in it, a note of the error says that it was not in the harness. No
    timed call comes through here."""
    try:
        return call(*given)
    except torch.OutOfMemoryError as error:
        if FOR_GUARDS not in getattr(error, "__notes__", ()):
            error.add_note(OF_KERNEL)
        raise


def caller_named(contract: Contract, problem: Problem, device: Device, name: str, config: str) -> Caller:
    """The implementation of that name: a kernel of the contract's operation, one of its ``rivals``, its plain maths. Raises
    ValueError: there is none of that name."""
    if is_operation(contract.name):
        one = operation(contract.name)
        for kernels in (one.peers, one.ours):  # peers first: ours import Triton
            for kernel in kernels():
                if kernel.name == name:
                    return KernelCaller(contract, problem, device, kernel, Config.parse(config))
    functions = {**contract.rivals(), PLAIN: None}
    if name not in functions:
        raise ValueError(f"no kernel or peer of the contract {contract.name} is called {name!r}")
    return FunctionCaller(contract, problem, functions[name])
