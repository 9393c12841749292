"""Gradients as a backward's contract asks a candidate for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

ONE_BY_ONE = "one gradient at a time, by a second backward"


def gradients_of(
    forward: Callable[[dict[str, torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    into: Sequence[torch.Tensor],
    one_by_one: bool,
) -> tuple[torch.Tensor, ...]:
    """The gradients of ``tensors`` by name, of ``into`` what ``forward`` gives for them as leaves. One that is not given counts
    as zero. With ``one_by_one`` each is the only leaf of a forward, as where the others are frozen, and the second backward
    through its graph counts: the first must leave what was saved."""
    made: tuple[torch.Tensor, ...] = ()
    for names in [[name] for name in tensors] if one_by_one else [list(tensors)]:
        leaves = {name: tensors[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            outputs = forward(leaves)
        every = list(leaves.values())
        with torch.autograd.set_multithreading_enabled(False):  # work on another thread would count as strayed
            if one_by_one:
                torch.autograd.grad(outputs, every, into, retain_graph=True)
            made += torch.autograd.grad(outputs, every, into, allow_unused=True, materialize_grads=True)
    return made
