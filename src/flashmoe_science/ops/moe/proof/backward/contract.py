"""The contract of the experts' backward: ``fn(x, w1, w2, topk_weights, topk_ids)``, differentiable through autograd; a step of
training, of problems from router logits, is ``fn(x, w1, w2, router_logits, top_k)``.

A candidate is called with leaves, and asked for the gradients of what it returns by ``dout``: of x, w1, w2, the routing weights
(or the logits), then of the biases where the problem has them. A gradient that it does not give counts as zero. A kernel of the
package is given the pre-activations too, as fp64 has them, rounded once.

The cap is the forward's, with the sums over an expert's rows: an element of dW is a sum of as many terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from flashmoe_science.contract import Errors, Mistake, Output
from flashmoe_science.kernel import Config
from flashmoe_science.ops.moe.call import activation_of
from flashmoe_science.ops.moe.call.backward import (
    BackwardInputs,
    BackwardKernel,
    BackwardLaunch,
    BackwardTensors,
    Gradients,
    Wanted,
)
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.proof.backward import suites
from flashmoe_science.ops.moe.proof.backward.oracle import gradients_oracle, gradients_plain, pre_activations
from flashmoe_science.ops.moe.proof.contract import BIASES, SharedContract, cap_of, oracle_tensors

Inputs = Mapping[str, torch.Tensor]


class MoEBackwardContract(SharedContract):
    """Gradients of experts, of routed tokens or with their router; see the module."""

    name: ClassVar[str] = "moe_backward"
    lists: ClassVar[Any] = suites
    outputs: ClassVar[tuple[Output, ...]] = (Output("dx"), Output("dw1"), Output("dw2"), Output("drouting"))
    calls: ClassVar[tuple[str, ...]] = ("thread",)  # autograd has modes of its own

    def inputs(self, problem: Any, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = super().inputs(problem, device, generator)
        return made | {"dout": torch.empty_like(made["x"]).normal_(generator=generator)}

    def call(self, fn: Callable[..., Any], problem: Any, inputs: Inputs) -> Any:
        given = _of_call(inputs)
        leaves = {name: one.detach().requires_grad_() for name, one in given.items() if one.is_floating_point()}
        with torch.enable_grad():
            out = super().call(fn, problem, {**given, **leaves})
        return torch.autograd.grad(out, list(leaves.values()), inputs["dout"], allow_unused=True, materialize_grads=True)

    def reference(self, problem: MoEBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        tensors = oracle_tensors(problem, _of_call(inputs), torch.float64)
        return gradients_oracle(tensors, activation_of(problem), inputs["dout"])

    def plain(self, problem: MoEBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        tensors = oracle_tensors(problem, _of_call(inputs), torch.float32)
        return gradients_plain(tensors, activation_of(problem), inputs["dout"])

    def cap(
        self, problem: MoEBackwardProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]
    ) -> tuple[Errors, ...]:
        sizes = problem.dim, problem.hidden, problem.top_k, problem.tokens
        return tuple(cap_of(one, inputs["x"].dtype, *sizes) for one in reference)

    def mistakes(self, problem: Any, inputs: Inputs) -> Iterator[Mistake]:
        if "topk_weights" in inputs:
            squared = {**inputs, "topk_weights": inputs["topk_weights"].square()}
            words = "it is right for routing weights that are applied twice"
            yield Mistake("weights-twice", words, self.reference(problem, squared))
        yield from super().mistakes(replace(problem, bias=False) if problem.bias else problem, _without_biases(inputs))

    def for_kernel(self, problem: MoEBackwardProblem, inputs: Inputs) -> BackwardInputs:
        given, wanted = oracle_tensors(problem, _of_call(inputs), torch.float32), Wanted(*4 * [True], *2 * [problem.bias])
        z = given.x.new_empty(problem.pairs(), given.w1.shape[1])
        tensors = BackwardTensors(*given, z, inputs["dout"])
        made = BackwardInputs(problem, tensors, activation_of(problem), wanted)
        if not given.x.is_meta:
            self.renew(problem, inputs, made)
        return made

    def renew(self, problem: MoEBackwardProblem, inputs: Inputs, given: BackwardInputs) -> None:
        """The pre-activations."""
        assert given.tensors.z is not None
        given.tensors.z.copy_(pre_activations(given.tensors.of_call()))

    def from_kernel(self, result: Gradients) -> tuple[torch.Tensor, ...]:
        return tuple(one for one in result if one is not None)

    def planned(
        self, kernel: BackwardKernel, config: Config, like: BackwardInputs
    ) -> Callable[[BackwardInputs], Gradients]:
        if kernel.plan is None:
            return lambda inputs: kernel.run(inputs, config)
        launch: BackwardLaunch = kernel.plan(like, config)(like)
        return lambda inputs: launch(*inputs.tensors)


def _of_call(inputs: Inputs) -> Inputs:
    return {name: one for name, one in inputs.items() if name != "dout"}


def _without_biases(inputs: Inputs) -> Inputs:
    return {name: one for name, one in inputs.items() if name not in BIASES}


CONTRACT = MoEBackwardContract()
