"""Implementations of a problem that several ranks share, and what the oracle computes of it: for the proof of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

Results = tuple[torch.Tensor, ...]


class Implementation(NamedTuple):
    """An implementation of a problem on the ranks of a group. Every rank calls it, with the inputs of the whole problem.

    ``prepare`` returns the call to be timed. It raises ValueError, ImportError or RuntimeError, in words, where the problem is
    not supported here. ``own_part`` takes this rank's part of the results. ``single_gpu``: one GPU computes the whole, and
    rank 0 is timed. ``capturable``: a CUDA graph can hold the call. ``context`` is entered around calls and not timed.
    ``bits`` gives two results that must be equal bit by bit. ``launches`` must be in the name of a kernel that a call
    launches: a call that fell back to one GPU launches none.
    """

    name: str
    config: str
    origin: Literal["ours", "peer"]
    prepare: Callable[[], Callable[[], Results]]
    own_part: Callable[[Results], Results] = lambda results: results
    single_gpu: bool = False
    capturable: bool = True
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    bits: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    launches: str = ""


class Checked(NamedTuple):
    """The part of a problem that the oracle computes: a smaller ``problem`` with ``inputs``, both for the contract.
    ``of_reference`` takes this rank's part of the oracle's results, ``of_results`` the same elements of this rank's part of an
    implementation's results."""

    problem: Any
    inputs: Mapping[str, torch.Tensor]
    of_reference: Callable[[Results], Results]
    of_results: Callable[[Results], Results]


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x [N, ...] of every rank, [ranks, N, ...]."""
    found = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(found, x.contiguous(), group)
    return found.view(group.size(), *x.shape)
