"""The autograd rule of ``flashmoe::attention_forward``: by PyTorch's operators, or by ``flashmoe::attention_backward``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.operations import operation
from flashmoe_science.ops.attention.call.backward import Saved, Wanted, unexpanded
from flashmoe_science.ops.attention.call.kernel import AttentionLaunch
from flashmoe_science.ops.attention.call.outputs import Result
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, Options, Tensors
from flashmoe_science.ops.attention.front.arguments import of_features
from flashmoe_science.ops.attention.front.backward.choose import check_gradients, choose_backward, why_no_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR, by_kernel
from flashmoe_science.ops.attention.front.pytorch import pytorch_attention
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.calls import is_plain

_COUNT = 15  # of the tensors that a forward without an append has
_NO_FEATURES = (None,) * (len(Tensors._fields) - 3)
_GRADIENTS = tuple(map(Tensors._fields.index, ("q", "k", "v", "sinks", "bias")))  # of Wanted, in its order


class Step(NamedTuple):
    """How a call whose inputs require gradients is served, and its gradients.

    options: of the forward. ``kernel``: of the backward, None where there is none and ``refusal`` says why.
    launch: the forward bound to tensors like the call's, for calls that may go around PyTorch's dispatcher; None: through it.
    """

    options: Options
    kernel: str | None = None
    refusal: str | None = None
    launch: AttentionLaunch | None = None

    def served(self, tensors: Tensors, scale: float | None) -> Result:
        """The call as a part of PyTorch's graph; heads come first."""
        bias, shape = tensors.bias, None if tensors.bias is None else tensors.bias.shape
        if bias is not None:
            bias = unexpanded(bias)  # what it is expanded by is summed over in fp32
            tensors = tensors._replace(bias=bias)
        given = tensors[:3] if tensors[3:] == _NO_FEATURES else tensors[:_COUNT]  # each costs time, None too
        out, lse = _Attention.apply(self, scale, shape, *given)  # type: ignore[no-untyped-call]
        return out, lse if self.options.return_lse else None


def differentiable(tensors: Tensors, options: Options, softmax_scale: float | None) -> Result:
    """Attention that is part of PyTorch's graph, for a call that has been checked; heads come first. Raises CannotServe,
    ValueError as ``step_of``."""
    step = step_of(tensors, options)[0]
    return pytorch_attention(tensors, options, softmax_scale) if step is None else step.served(tensors, softmax_scale)


def step_of(tensors: Tensors, options: Options) -> tuple[Step | None, Decision | None]:
    """How a checked call is served, None where PyTorch's operators serve the forward and the backward; and the decision for the
    backward, None where there is none. Raises CannotServe, ValueError as ``choose_backward``; ALiBi slopes that require
    gradients."""
    check_gradients(tensors, options)
    refusal = why_no_backward(tensors, options)
    if refusal is not None:
        return Step(options, None, refusal), None
    decision = choose_backward(tensors, options)
    if decision.kernel == FALLBACK:
        return None, decision
    return Step(options._replace(kernel=_forward_kernel(options)), decision.kernel), decision


def _forward_kernel(options: Options) -> str | None:
    """The kernel asked for, if it is one of the forward; None leaves the choice."""
    names = {one.name for one in operation(AttentionBackwardProblem.op).kernels()}
    return None if options.kernel in names else options.kernel


class _Attention(torch.autograd.Function):
    """The forward and the backward of a Step: their operators, or around them their launches. ``shape``: of the bias, which
    comes without what it is expanded by."""

    @staticmethod
    def forward(ctx: Any, step: Step, scale: float | None, shape: Any, *given: Any) -> Any:
        tensors, result = _expanded(given, shape), None
        if step.launch is not None:
            result = step.launch(tensors, scale, ALL_KEYS, None, None)
        if result is None:
            options = step.options
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
        tensors = _expanded(given, shape)
        if dout is None:
            dout = torch.zeros_like(out)
        needed = ctx.needs_input_grad[3:]
        wanted = Wanted(*[place < len(needed) and needed[place] for place in _GRADIENTS])
        if not torch.is_grad_enabled() and is_plain(dout, dlse, tensors.q):
            options = step.options._replace(kernel=step.kernel, return_lse=True)
            made = by_kernel(tensors, Saved(out, lse, dout, dlse), options, scale, wanted)
        else:
            rest = of_features(tensors, step.options)
            made = OPERATOR(
                dout, dlse, *tensors[:3], out, lse, list(wanted), step.options.mask, scale, step.kernel, *rest
            )
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        for place, gradient, asked in zip(_GRADIENTS, made, wanted, strict=True):
            if asked:
                gradients[place] = gradient
        return (None, None, None, *gradients)


def _expanded(given: Any, shape: Any) -> Tensors:
    tensors = Tensors(*given)
    return tensors if tensors.bias is None else tensors._replace(bias=tensors.bias.expand(shape))
