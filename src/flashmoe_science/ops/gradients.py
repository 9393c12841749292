"""Gradients as a backward's contract asks a candidate for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ONE_BY_ONE = "one gradient at a time, by a second backward"
AFTER_ANOTHER = "another forward before the backward"
AFTER_CHANGE = "its output changed in place before the backward"
OF_OUTPUT = "its output, of inputs that require gradients"


def output_of(forward: Callable[[dict[str, torch.Tensor]], Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """What ``forward`` gives for ``tensors`` as leaves, without its graph."""
    with torch.enable_grad():
        result = forward({name: one.detach().requires_grad_() for name, one in tensors.items()})
    return result.detach() if isinstance(result, torch.Tensor) else result


def gradients_of(
    forward: Callable[[dict[str, torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    into: Sequence[torch.Tensor],
    asked: str,
) -> tuple[torch.Tensor, ...]:
    """The gradients of ``tensors`` by name, by ``into`` what ``forward`` gives for them as leaves. A missing one counts as
    zero. ``asked`` ONE_BY_ONE: each is the only leaf of a forward, as if the others were frozen, and the second backward
    through its graph counts: the first must keep what was saved. AFTER_ANOTHER: a forward of other values, as of the next
    layer, comes between. AFTER_CHANGE: the outputs are overwritten; where autograd refuses that, as it does of what was saved
    with ``save_for_backward``, they are not."""
    made: tuple[torch.Tensor, ...] = ()
    one_by_one = asked == ONE_BY_ONE
    for names in [[name] for name in tensors] if one_by_one else [list(tensors)]:
        leaves = {name: tensors[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            outputs = forward(leaves)
            if asked == AFTER_ANOTHER:
                forward({name: one.detach().flip(0).mul(0.5).requires_grad_() for name, one in leaves.items()})
        for one in outputs if asked == AFTER_CHANGE else ():
            one.detach().zero_()
        every = list(leaves.values())
        if one_by_one and not any(one.requires_grad for one in outputs):
            made += (torch.zeros_like(*every),)
            continue
        with torch.autograd.set_multithreading_enabled(False):  # work on another thread would count as strayed
            if one_by_one:
                torch.autograd.grad(outputs, every, into, retain_graph=True, allow_unused=True)
            try:
                made += torch.autograd.grad(outputs, every, into, allow_unused=True, materialize_grads=True)
            except RuntimeError as error:
                if asked != AFTER_CHANGE or "modified by an inplace operation" not in str(error):
                    raise
                return gradients_of(forward, tensors, into, "")
    return made
