"""The autograd rule of ``flashmoe::moe_forward``: gradients by ``flashmoe::moe_backward``, or by the launches of both.

The call's own tensors and, without ``recompute``, the pre-activations are saved between the passes, and no copy of a weight:
FSDP2 frees weights and gathers them again. Gates and ups as two tensors are joined in each pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashmoe_science.ops.calls import is_plain, is_transformed
from flashmoe_science.ops.moe.call import Activation, MoELaunch, Tensors
from flashmoe_science.ops.moe.call.backward import INPUTS, NEW, BackwardTensors, Sums, Wanted
from flashmoe_science.ops.moe.call.pair import Pair, joined
from flashmoe_science.ops.moe.front.backward.choose import names_of
from flashmoe_science.ops.moe.front.backward.operator import ADDING, OPERATOR, gradients_of
from flashmoe_science.ops.moe.front.kernels import FALLBACK
from flashmoe_science.ops.moe.pytorch import pytorch_moe

_OPTIONS = 4  # arguments of the rule before the tensors, gates and ups among them
_W1 = Tensors._fields.index("w1")
_GRADIENTS = tuple(map(Tensors._fields.index, INPUTS))  # of Wanted, in its order


class Step(NamedTuple):
    """How experts whose inputs require gradients are served, and their gradients.

    kernel, backward: the requested names of the forward and the backward; None leaves the choice.
    launch: the forward bound to tensors like the call's, for calls that may bypass PyTorch's dispatcher; None for others. It
        returns the pre-activations too unless ``recompute``.
    """

    activation: Activation
    kernel: str | None
    backward: str | None
    recompute: bool
    launch: MoELaunch | None = None

    def served(self, tensors: Tensors, sums: Sums = NEW, pair: Pair | None = None) -> torch.Tensor:
        """A call as part of PyTorch's graph. ``pair``: the gates and the ups, [E, I, H] each, if w1 joins them."""
        count = len(tensors)
        while tensors[count - 1] is None:  # an argument of the rule that is None takes time all the same
            count -= 1
        out: torch.Tensor = _Experts.apply(self, sums, *(pair or (None, None)), *tensors[:count])  # type: ignore[no-untyped-call]
        return out


def differentiable(tensors: Tensors, activation: Activation, kernel: str | None, recompute: bool) -> torch.Tensor:
    """Experts as part of PyTorch's graph, of checked tensors, by the operators.

    PyTorch's operators and their own derivatives, of any order, serve if requested by name, and under a transform of torch.func
    or forward-mode gradients. Raises CannotServe: as ``names_of``. Raises ValueError: no kernel has the name.
    """
    if kernel == FALLBACK:
        return pytorch_moe(tensors, activation)
    names = names_of(kernel)
    return pytorch_moe(tensors, activation) if is_transformed() else Step(activation, *names, recompute).served(tensors)


def unviewed(out: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The result in that shape, not as a view: an in-place operation on a view would remove FSDP2's hooks."""
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(out, shape)
    return shaped


class _Experts(torch.autograd.Function):
    """The forward and the backward of a Step: by their operators, or by their launches."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, sums: Sums, gate: torch.Tensor | None, up: torch.Tensor | None, *given: Any
    ) -> torch.Tensor:
        tensors = Tensors(*given)
        out = _by_operator(step, tensors) if step.launch is None else step.launch(*tensors)
        out, z = (out, None) if step.recompute else out
        ctx.call = step, sums
        kept = given if gate is None else (*given[:_W1], None, *given[_W1 + 1 :])
        ctx.save_for_backward(gate, up, z, *kept)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        step, sums = ctx.call
        gate, up, z, *given = ctx.saved_tensors
        of_gate, of_up, *needed = ctx.needs_input_grad[_OPTIONS - 2 :]
        tensors, wanted = Tensors(*given), Wanted(*[place < len(needed) and needed[place] for place in _GRADIENTS])
        if gate is not None:
            tensors, wanted = tensors._replace(w1=joined(gate, up)), wanted._replace(dw1=of_gate or of_up)
        saved = BackwardTensors(*tensors, z, dout)
        if not torch.is_grad_enabled() and is_plain(dout, tensors.x, *sums):
            made: Any = gradients_of(saved, step.activation, wanted, step.backward, sums)
        else:
            a, added = step.activation, any(one is not None for one in sums)
            options = a.function, a.gated, a.interleaved, a.alpha, a.limit, step.backward, a.w8a8
            made = (ADDING if added else OPERATOR)(*saved, list(wanted), *options, *(sums if added else ()))
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        for place, gradient, asked, total in zip(_GRADIENTS, made, wanted, (None, *sums, None, None, None), strict=True):
            if asked and total is None:
                gradients[place] = gradient
        parts: list[torch.Tensor | None] = [None, None]
        if gate is not None and (whole := gradients[_W1]) is not None:
            parts = [one if asked else None for one, asked in zip(whole.chunk(2, 1), (of_gate, of_up), strict=True)]
            gradients[_W1] = None
        return None, None, *parts, *gradients


def _by_operator(step: Step, tensors: Tensors) -> Any:
    a, operators = step.activation, torch.ops.flashmoe
    options = a.function, a.gated, a.interleaved, a.alpha, a.limit
    if step.recompute:
        return operators.moe_forward.default(*tensors, *options, step.kernel, a.w8a8)
    return operators.moe_forward_saving.default(*tensors, *options, step.kernel or step.backward, a.w8a8)
