"""The autograd rule of ``flashmoe::attention_forward``: by PyTorch's operators, or by ``flashmoe::attention_backward``."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.operations import operation
from flashmoe_science.ops.attention.call.backward import unexpanded
from flashmoe_science.ops.attention.call.outputs import Result
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.arguments import of_features
from flashmoe_science.ops.attention.front.backward.choose import check_gradients, choose_backward, why_no_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR
from flashmoe_science.ops.attention.front.pytorch import pytorch_attention
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem

_COUNT = 15  # of the tensors that a forward without an append has
_GRADIENTS = tuple(map(Tensors._fields.index, ("q", "k", "v", "sinks", "bias")))  # of Wanted, in its order


def differentiable(tensors: Tensors, options: Options, softmax_scale: float | None) -> Result:
    """Attention that is part of PyTorch's graph, for a call that has been checked; heads come first. Raises CannotServe,
    ValueError as ``choose_backward``; ALiBi slopes that require gradients."""
    check_gradients(tensors, options)
    refusal = why_no_backward(tensors, options)
    if refusal is None:
        decision = choose_backward(tensors, options)
        if decision.kernel == FALLBACK:
            return pytorch_attention(tensors, options, softmax_scale)
        options = options._replace(kernel=forward_kernel(options))
        return _applied(tensors, options, softmax_scale, decision.kernel, None)
    return _applied(tensors, options, softmax_scale, None, refusal)


def forward_kernel(options: Options) -> str | None:
    """The kernel asked for, if it is one of the forward; None leaves the choice."""
    names = {one.name for one in operation(AttentionBackwardProblem.op).kernels()}
    return None if options.kernel in names else options.kernel


def _applied(tensors: Tensors, options: Options, scale: float | None, kernel: str | None, refusal: str | None) -> Result:
    bias, shape = tensors.bias, None if tensors.bias is None else tensors.bias.shape
    if bias is not None:
        bias = unexpanded(bias)  # what it is expanded by is summed over in fp32
    given = tensors._replace(bias=bias)[:_COUNT]
    out, lse = _Attention.apply(options, scale, kernel, refusal, shape, *given)  # type: ignore[no-untyped-call]
    return out, lse if options.return_lse else None


class _Attention(torch.autograd.Function):
    """The forward's operator, and the backward's. ``refusal``: why there is no backward, if there is none."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, scale: float | None, kernel: str | None, refusal: str | None, shape: Any, *given: Any
    ) -> Any:
        tensors = _expanded(given, shape)
        return_lse = options.return_lse or refusal is None
        forward = torch.ops.flashmoe.attention_forward.default
        rest = of_features(tensors, options)
        out, lse = forward(*tensors[:3], options.mask, scale, return_lse, options.kernel, *rest)
        ctx.call, ctx.refusal = (options, scale, kernel, shape), refusal
        ctx.set_materialize_grads(False)
        if refusal is None:
            ctx.save_for_backward(*given, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        if ctx.refusal is not None:
            raise NotImplementedError(f"a gradient is asked for: {ctx.refusal}; call it under torch.no_grad()")
        options, scale, kernel, shape = ctx.call
        *given, out, lse = ctx.saved_tensors
        tensors = _expanded(given, shape)
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = [ctx.needs_input_grad[5 + place] for place in _GRADIENTS]
        rest = of_features(tensors, options)
        made = OPERATOR(dout, dlse, *tensors[:3], out, lse, wanted, options.mask, scale, kernel, *rest)
        gradients: list[torch.Tensor | None] = [None] * _COUNT
        for place, gradient, needed in zip(_GRADIENTS, made, wanted, strict=True):
            gradients[place] = gradient if needed else None
        return (None, None, None, None, None, *gradients)


def _expanded(given: Any, shape: Any) -> Tensors:
    tensors = Tensors(*given)
    return tensors if tensors.bias is None else tensors._replace(bias=tensors.bias.expand(shape))
