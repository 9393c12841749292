"""Comparison of arguments between ranks: all ranks raise alike, and none waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_science.ops.checks import CHECK
from flashmoe_science.ops.explain import is_explaining


@contextmanager
def waiting(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """A context that waits for the other ranks. An error of torch.distributed then says what this rank did."""
    try:
        yield
    except RuntimeError as error:
        late = "a rank has ended or raised, or was later than the time limit of the group"
        error.add_note(f"rank {group.rank()} of {group.size()} was {what}: {late}")
        raise


def compares(x: object) -> bool:
    """Whether ranks compare the arguments of a call with ``x``: on the CPU and with FLASHMOE_CHECK=1, not if a GPU would have
    to be waited for, nor when explaining."""
    return not is_explaining() and (CHECK or not isinstance(x, torch.Tensor) or x.device.type in ("cpu", "meta"))


@contextmanager
def agreed(group: dist.ProcessGroup, compare: bool = True) -> Iterator[dict[str, object]]:
    """A block that checks a call's arguments and fills in the facts, by name, that must be equal on all ranks. Every rank runs
    it. At its end it raises this rank's refusal, or ValueError if another rank refuses or has other facts. ``compare``: send
    both to the other ranks; else only this rank's refusal is known."""
    facts, refused, words = dict[str, object](), None, ""
    try:
        yield facts
    except Exception as error:  # whatever it is, the others would wait for this rank
        refused, words = error, str(error) or type(error).__name__
    everyone: list[tuple[dict[str, object], str]] = []
    if compare:
        everyone = [(facts, "")] * group.size()
        with waiting(group, "comparing its arguments with the others'"):  # those that are refused may not be picklable
            dist.all_gather_object(everyone, ({} if words else facts, words), group=group)
    if refused is not None:
        raise refused
    for rank, (theirs, refusal) in enumerate(everyone):
        if refusal:
            raise ValueError(f"rank {rank} of the group refuses the call: {refusal}")
        for name, value in theirs.items():
            if value != everyone[0][0].get(name):
                given = f"{name} is {value} on rank {rank} of the group and {everyone[0][0].get(name)} on rank 0"
                raise ValueError(f"{given}; it must be the same on every rank")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of a torch.autograd.Function that refuses create_graph=True on all ranks, before any message.

    With PyTorch's decorator of this name, torch.autograd.grad of a sum omits the terms that need a second derivative.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph is True; it must be False: gradients over several ranks have no derivative")
        return backward(ctx, *gradients)

    return refusing
