"""The autograd rule of ``flashmoe::attention_forward``: by PyTorch's operators, or by ``flashmoe::attention_backward``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.operations import operation
from flashmoe_science.ops.attention.call.backward import BackwardLaunch, Saved, Wanted, unexpanded
from flashmoe_science.ops.attention.call.kernel import AttentionLaunch
from flashmoe_science.ops.attention.call.outputs import Result
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, NO_FEATURES, Given, Options, Tensors
from flashmoe_science.ops.attention.front.arguments import of_features
from flashmoe_science.ops.attention.front.backward.choose import check_gradients, choose_backward, why_no_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR, by_kernel
from flashmoe_science.ops.attention.front.pytorch import pytorch_attention
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.calls import find_launch, is_plain

_COUNT = 15  # of the tensors that a forward without an append has
_GRADIENTS = tuple(map(Tensors._fields.index, ("q", "k", "v", "sinks", "bias")))  # of Wanted, in its order


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """How a call whose inputs require gradients is served, and its gradients. Compared by identity, as a part of keys.

    options: of the forward. ``kernel``: of the backward; None if there is none, and ``refusal`` says why.
    launch: the forward bound to tensors like the call's, for calls that may bypass PyTorch's dispatcher; None for others.
    """

    options: Options
    kernel: str | None = None
    refusal: str | None = None
    launch: AttentionLaunch | None = None

    def served(self, tensors: Given, scale: float | None) -> Result:
        """The call as a part of PyTorch's graph; heads come first."""
        shape = None
        if len(tensors) > 3:
            every = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
            if (bias := every.bias) is not None:  # what it is expanded by is summed over in fp32
                every, shape = every._replace(bias=unexpanded(bias)), bias.shape
            tensors = every[:3] if every[3:] == NO_FEATURES else every[:_COUNT]  # each costs time, None too
        out, lse = _Attention.apply(self, scale, shape, *tensors)  # type: ignore[no-untyped-call]
        return out, lse if self.options.return_lse else None


def differentiable(tensors: Tensors, options: Options, softmax_scale: float | None) -> Result:
    """Attention as part of PyTorch's graph, for a checked call; heads come first. Raises CannotServe, ValueError as
    ``step_of``."""
    step = step_of(tensors, options)[0]
    return pytorch_attention(tensors, options, softmax_scale) if step is None else step.served(tensors, softmax_scale)


def step_of(tensors: Tensors, options: Options) -> tuple[Step | None, Decision | None]:
    """How a checked call is served, None if PyTorch's operators serve both passes; and the decision for the backward, None if
    there is none. Raises CannotServe, ValueError as ``choose_backward``; ALiBi slopes that require gradients."""
    check_gradients(tensors, options)
    refusal = why_no_backward(tensors, options)
    if refusal is not None:
        return Step(options, None, refusal), None
    decision = choose_backward(tensors, options)
    if decision.kernel == FALLBACK:
        return None, decision
    return Step(options._replace(kernel=_forward_kernel(options)), decision.kernel), decision


def _forward_kernel(options: Options) -> str | None:
    """The requested kernel, if it is a forward's; None leaves the choice."""
    names = {one.name for one in operation(AttentionBackwardProblem.op).kernels()}
    return None if options.kernel in names else options.kernel


class _Attention(torch.autograd.Function):
    """The forward and the backward of a Step: by their operators, or by their launches. ``shape``: of the bias, which comes
    unexpanded."""

    @staticmethod
    def forward(ctx: Any, step: Step, scale: float | None, shape: Any, *given: Any) -> Any:
        result = None
        if step.launch is not None:
            result = step.launch(given if len(given) == 3 else _expanded(given, shape), scale, ALL_KEYS, None, None)
        if result is None:
            tensors, options = _expanded(given, shape), step.options
            return_lse = options.return_lse or step.refusal is None
            rest = of_features(tensors, options)
            forward = torch.ops.flashmoe.attention_forward.default
            result = forward(*tensors[:3], options.mask, scale, return_lse, options.kernel, *rest)
        ctx.call = step, scale, shape
        ctx.set_materialize_grads(False)
        if step.refusal is None:
            ctx.save_for_backward(*given, *result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        step, scale, shape = ctx.call
        if step.refusal is not None:
            raise NotImplementedError(f"a gradient is asked for: {step.refusal}; call it under torch.no_grad()")
        *given, out, lse = ctx.saved_tensors
        saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        needed = ctx.needs_input_grad[3:]
        wanted = Wanted(*[place < len(needed) and needed[place] for place in _GRADIENTS])
        made = _gradients(step, _expanded(given, shape), saved, scale, wanted)
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        for place, gradient, asked in zip(_GRADIENTS, made, wanted, strict=True):
            if asked:
                gradients[place] = gradient
        return (None, None, None, *gradients)


def _gradients(
    step: Step, tensors: Tensors, saved: Saved, scale: float | None, wanted: Wanted
) -> Sequence[torch.Tensor | None]:
    """The gradients, by a launch stored under the step, or through PyTorch's dispatcher if something may see the call."""
    if not torch.is_grad_enabled():
        key, given = (step, wanted, saved.dlse is None), [one for one in (*tensors, *saved) if one is not None]
        launch: BackwardLaunch | None = find_launch(key, given)
        if launch is not None:
            return launch(tensors, saved, tensors.q.shape[3] ** -0.5 if scale is None else scale)
        if is_plain(*given):
            options = step.options._replace(kernel=step.kernel, return_lse=True)
            return by_kernel(tensors, saved, options, scale, wanted, key)
    (out, lse, dout, dlse), options = saved, step.options
    rest = of_features(tensors, options)
    made: Sequence[torch.Tensor] = OPERATOR(
        dout, dlse, *tensors[:3], out, lse, list(wanted), options.mask, scale, step.kernel, *rest
    )
    return made


def _expanded(given: Any, shape: Any) -> Tensors:
    tensors = Tensors(*given)
    return tensors if tensors.bias is None else tensors._replace(bias=tensors.bias.expand(shape))
