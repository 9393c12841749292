"""The autograd rule of ``flashmoe::moe_forward``: gradients by ``flashmoe::moe_backward``.

Saved between the passes are the call's own tensors and the pre-activations, which ``recompute`` leaves out: no copy of a
weight, as FSDP2 frees the memory of weights and gathers them again. Gates and ups that are two tensors are joined in each pass.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.calls import is_transformed
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.call.backward import INPUTS, NEW, Sums
from flashmoe_science.ops.moe.call.pair import Pair, joined
from flashmoe_science.ops.moe.front.backward.choose import names_of
from flashmoe_science.ops.moe.front.backward.operator import ADDING, OPERATOR
from flashmoe_science.ops.moe.front.kernels import FALLBACK
from flashmoe_science.ops.moe.pytorch import pytorch_moe

_OPTIONS = 5  # arguments of the rule before the pair of gates and ups, and the tensors
_W1 = Tensors._fields.index("w1")
_GRADIENTS = tuple(map(Tensors._fields.index, INPUTS))  # of Wanted, in its order


def differentiable(
    tensors: Tensors, activation: Activation, kernel: str | None, recompute: bool, sums: Sums = NEW, pair: Pair | None = None
) -> torch.Tensor:
    """Experts that are part of PyTorch's graph, of tensors that have been checked. ``pair``: the gates and the ups,
    [E, I, H] each, where w1 was joined of them.

    By PyTorch's operators and their own derivatives, of any order, where they are asked for by name, and under a transform of
    torch.func or forward-mode gradients. Raises CannotServe: as ``names_of``. Raises ValueError: no kernel has the name.
    """
    if kernel == FALLBACK:
        return pytorch_moe(tensors, activation)
    names = names_of(kernel)
    if is_transformed():
        return pytorch_moe(tensors, activation)
    options = activation, *names, recompute, sums
    out: torch.Tensor = _Experts.apply(*options, *(pair or (None, None)), *tensors)  # type: ignore[no-untyped-call]
    return out


def unviewed(out: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The result in that shape, as no view: an operation in place on a view of it would take FSDP2's hooks away."""
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(out, shape)
    return shaped


class _Experts(torch.autograd.Function):
    """The forward's operator, and the backward's."""

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, kernel: str | None, backward: str | None, recompute: bool, sums: Sums,
        gate: torch.Tensor | None, up: torch.Tensor | None, *tensors: Any,
    ) -> torch.Tensor:  # fmt: skip
        a, operators = activation, torch.ops.flashmoe
        options = a.function, a.gated, a.interleaved, a.alpha, a.limit
        z, out = None, None
        if recompute:
            out = operators.moe_forward.default(*tensors, *options, kernel, a.w8a8)
        else:
            out, z = operators.moe_forward_saving.default(*tensors, *options, kernel or backward, a.w8a8)
        ctx.call = options, (backward, a.w8a8), sums
        kept = tensors if gate is None else (*tensors[:_W1], None, *tensors[_W1 + 1 :])
        ctx.save_for_backward(gate, up, *kept, z)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        options, kernel, sums = ctx.call
        gate, up, *tensors = ctx.saved_tensors
        of_parts, of_tensors = ctx.needs_input_grad[_OPTIONS : _OPTIONS + 2], ctx.needs_input_grad[_OPTIONS + 2 :]
        wanted = [of_tensors[place] for place in _GRADIENTS]
        if gate is not None:
            tensors[_W1], wanted[_GRADIENTS.index(_W1)] = joined(gate, up), any(of_parts)
        if not any(one is not None for one in sums):
            made = OPERATOR(*tensors, dout, wanted, *options, *kernel)
        else:
            made = ADDING(*tensors, dout, wanted, *options, *kernel, *sums)
        gradients: list[torch.Tensor | None] = [None] * len(Tensors._fields)
        added = (None, *sums, None, None, None)
        for place, gradient, needed, total in zip(_GRADIENTS, made, wanted, added, strict=True):
            gradients[place] = gradient if needed and total is None else None
        parts: list[torch.Tensor | None] = [None, None]
        if gate is not None and (whole := gradients[_W1]) is not None:
            parts = [one if needed else None for one, needed in zip(whole.chunk(2, 1), of_parts, strict=True)]
            gradients[_W1] = None
        return (*_OPTIONS * (None,), *parts, *gradients)
