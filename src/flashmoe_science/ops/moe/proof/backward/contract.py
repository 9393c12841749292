"""The contract of the experts' backward: ``fn(x, w1, w2, topk_weights, topk_ids)``, differentiable through autograd; a step of
training, of problems from router logits, is ``fn(x, w1, w2, router_logits, top_k)``.

A candidate is called with leaves, and asked for the gradients of what it returns by ``dout``: of x, w1, w2, the routing weights
(or the logits), then of the biases where the problem has them. A gradient that it does not give counts as zero. A kernel of the
package is given the pre-activations too, as fp64 has them, rounded once.

The cap is the forward's, with the sums over an expert's rows: an element of dW is a sum of as many terms. Of a routing weight's
gradient, of which there may be one, the terms may cancel: its size is at least their 2-norm, with which its error goes. A
clamp's gradient jumps at its limit, and a pre-activation that is rounded to the dtype may come to lie on the other side: the
cap has what the gradients change by where the limit is a rounding lower or higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flashmoe_science.contract import Errors, Mistake, Output, unit_roundoff
from flashmoe_science.kernel import Config
from flashmoe_science.operations import public
from flashmoe_science.ops.gradients import AFTER_ANOTHER, AFTER_CHANGE, OF_OUTPUT, ONE_BY_ONE, gradients_of, output_of
from flashmoe_science.ops.moe.call import activation_of
from flashmoe_science.ops.moe.call.backward import (
    NEW,
    BackwardInputs,
    BackwardKernel,
    BackwardLaunch,
    BackwardTensors,
    Gradients,
    StepInputs,
)
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.proof.backward import suites
from flashmoe_science.ops.moe.proof.backward.oracle import (
    gradients_oracle,
    gradients_plain,
    pre_activations,
    routing_gradient,
    routing_mass,
)
from flashmoe_science.ops.moe.proof.contract import BIASES, MoEContract, SharedContract, cap_of, oracle_tensors
from flashmoe_science.ops.moe.proof.variants import EQUAL_EXPERTS, VARIANTS
from flashmoe_science.ops.moe.route.route import bind_route
from flashmoe_science.ops.moe.route.spec import Options as RouterOptions
from flashmoe_science.ops.moe.route.spec import Tensors as RouterTensors

Inputs = Mapping[str, torch.Tensor]
public("flashmoe_science.moe:fused_moe")  # its module defines the operators of a step


# Gradients in memory as what follows the experts leaves them.
_GIVEN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a gradient of stride 0 (of a sum)": lambda dout: dout.new_ones(()).expand_as(dout),
    "a gradient whose tokens are columns": lambda dout: dout.T.contiguous().T,
    "a gradient that is a slice": lambda dout: dout.repeat(2, 2)[: dout.shape[0], : dout.shape[1]],
}


class MoEBackwardContract(SharedContract):
    """Gradients of experts, of routed tokens or with their router; see the module."""

    name: ClassVar[str] = "moe_backward"
    lists: ClassVar[Any] = suites
    outputs: ClassVar[tuple[Output, ...]] = (Output("dx"), Output("dw1"), Output("dw2"), Output("drouting"))
    calls: ClassVar[tuple[str, ...]] = ("autocast", "default", "thread")  # autograd has modes of its own
    sweep_variants: ClassVar[tuple[str, ...]] = (
        *(one for one in VARIANTS if one != EQUAL_EXPERTS),
        *_GIVEN,
        ONE_BY_ONE,
        AFTER_ANOTHER,
        AFTER_CHANGE,
    )
    everywhere: ClassVar[tuple[str, ...]] = (OF_OUTPUT,)
    _asked = ""

    def variant(self, name: str) -> Any:
        if name == OF_OUTPUT:
            return _Output()
        if name in VARIANTS:
            return super().variant(name)
        asks = type(self)()
        asks._asked = name
        return asks

    def inputs(self, problem: Any, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = super().inputs(problem, device, generator)
        dout = torch.empty_like(made["x"]).normal_(generator=generator)
        return made | {"dout": _GIVEN[self._asked](dout) if self._asked in _GIVEN else dout}

    def call(self, fn: Callable[..., Any], problem: Any, inputs: Inputs) -> Any:
        given, of_call = _of_call(inputs), super().call
        into = [inputs["dout"]]
        return gradients_of(lambda leaves: [of_call(fn, problem, {**given, **leaves})], _floating(given), into, self._asked)

    def reference(self, problem: MoEBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return _gradients(gradients_oracle, problem, inputs, torch.float64)

    def plain(self, problem: MoEBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return _gradients(gradients_plain, problem, inputs, torch.float32)

    def cap(self, problem: MoEBackwardProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]) -> tuple[Errors, ...]:
        sizes = problem.dim, problem.hidden, problem.top_k, problem.tokens
        of_routing = torch.maximum(reference[3].abs(), _routing_mass(problem, inputs))
        caps = tuple(cap_of(one, inputs["x"].dtype, *sizes) for one in (*reference[:3], of_routing, *reference[4:]))
        if problem.activation != "clamped_silu":
            return caps
        unit, limit = 2 * unit_roundoff(inputs["x"].dtype), activation_of(problem).limit
        below, above = (_gradients(gradients_oracle, problem, inputs, torch.float64, limit * (1 + by)) for by in (-unit, unit))
        jumps = (Errors.of(one.sub_(other)) for one, other in zip(below, above, strict=True))  # in place: tens of gigabytes
        return tuple(
            Errors(cap.max + jump.max, cap.rms + jump.rms, cap.mean + jump.mean) for cap, jump in zip(caps, jumps, strict=True)
        )

    def mistakes(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        if "topk_weights" in inputs:
            squared = {**inputs, "topk_weights": inputs["topk_weights"].square()}
            words = "it is right for routing weights that are applied twice"
            yield Mistake("weights-twice", words, self.reference(problem, squared))
        yield from super().mistakes(problem, inputs)

    def for_kernel(self, problem: MoEBackwardProblem, inputs: Inputs) -> BackwardInputs | StepInputs:
        if problem.routing != "ids":
            biases = {name: inputs.get(name) for name in BIASES}
            return StepInputs(problem, activation=activation_of(problem), **{**inputs, **biases})  # type: ignore[arg-type]
        given = oracle_tensors(problem, _of_call(inputs), torch.float32)
        z = given.x.new_empty(problem.pairs(), given.w1.shape[1])
        tensors = BackwardTensors(*given, z, inputs["dout"])
        made = BackwardInputs(problem, tensors, activation_of(problem))
        if not given.x.is_meta:
            self.renew(problem, inputs, made)
        return made

    def renew(self, problem: MoEBackwardProblem, inputs: Inputs, given: BackwardInputs | StepInputs) -> None:
        """The pre-activations."""
        if isinstance(given, BackwardInputs):
            assert given.tensors.z is not None
            given.tensors.z.copy_(pre_activations(given.tensors.of_call()))

    def from_kernel(self, result: Gradients) -> tuple[torch.Tensor, ...]:
        return tuple(one for one in result if one is not None)

    def planned(self, kernel: BackwardKernel, config: Config, like: BackwardInputs | StepInputs) -> Callable[[Any], Gradients]:
        if kernel.plan is None:
            return lambda inputs: kernel.run(inputs, config)
        if isinstance(like, StepInputs):
            return _step(kernel, config, like)
        launch: BackwardLaunch = kernel.plan(like, config)(like)
        return lambda inputs: launch(inputs.tensors, inputs.sums)


class _Output(MoEContract):
    """The output of a candidate of the backward, called as for a training step."""

    def call(self, fn: Callable[..., Any], problem: Any, inputs: Inputs) -> Any:
        of_call = super().call
        return output_of(lambda leaves: of_call(fn, problem, {**inputs, **leaves}), _floating(inputs))


def _floating(inputs: Inputs) -> Inputs:
    return {name: one for name, one in inputs.items() if one.is_floating_point()}


def _step(kernel: BackwardKernel, config: Config, like: StepInputs) -> Callable[[StepInputs], Gradients]:
    """The router, the forward that saves and the backward, then the router's backward: without autograd, as in a graph."""
    problem, operators = like.problem.from_ids(), torch.ops.flashmoe
    routing = RouterOptions(problem.top_k, normalize="sum")
    route = bind_route(RouterTensors(like.router_logits), routing)
    a = like.activation
    options = a.function, a.gated, a.interleaved, a.alpha, a.limit, kernel.name

    def given(inputs: StepInputs, weights: torch.Tensor, ids: torch.Tensor) -> BackwardInputs:
        tensors = inputs.routed(weights, ids)
        _, z = operators.moe_forward_saving(*tensors, *options)
        return BackwardInputs(problem, BackwardTensors(*tensors, z, inputs.dout), a)

    assert kernel.plan is not None
    first = given(like, *route(like.router_logits, None))
    launch: BackwardLaunch = kernel.plan(first, config)(first)

    def step(inputs: StepInputs) -> Gradients:
        weights, ids = route(inputs.router_logits, None)
        made = launch(given(inputs, weights, ids).tensors, NEW)
        of_logits = operators.moe_route_backward(made.dtopk_weights, inputs.router_logits, ids, *routing)
        return made._replace(dtopk_weights=of_logits)

    return step


def _gradients(
    gradients: Callable[..., tuple[torch.Tensor, ...]],
    problem: MoEBackwardProblem,
    inputs: Inputs,
    dtype: torch.dtype,
    limit: float = 7.0,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the problem's tensors. ``dtype``: the router's, at least fp32; ``limit``: the clamp's."""
    tensors = oracle_tensors(problem, _of_call(inputs), dtype)
    made = gradients(tensors, replace(activation_of(problem), limit=limit), inputs["dout"])
    if problem.routing == "ids":
        return made
    of_logits = routing_gradient(inputs["router_logits"].to(dtype), tensors.topk_ids, made[3])
    return *made[:3], of_logits, *made[4:]


def _routing_mass(problem: MoEBackwardProblem, inputs: Inputs) -> torch.Tensor:
    """``routing_mass``, of problems from router logits what a softmax makes of it at most."""
    tensors = oracle_tensors(problem, _of_call(inputs), torch.float64)
    mass, weights = routing_mass(tensors, activation_of(problem), inputs["dout"]), tensors.topk_weights.double()
    if problem.routing == "ids":
        return mass
    of_chosen = weights * (mass + (weights * mass).sum(-1, keepdim=True))
    return torch.zeros_like(inputs["router_logits"], dtype=torch.float64).scatter_(1, tensors.topk_ids.long(), of_chosen)


def _of_call(inputs: Inputs) -> Inputs:
    return {name: one for name, one in inputs.items() if name != "dout"}


CONTRACT = MoEBackwardContract()
