"""What the proof of an operation says of a problem on several ranks: the ways to compute it, and what the oracle holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

Results = tuple[torch.Tensor, ...]


def as_it_is(results: Results) -> Results:
    return results


class Way(NamedTuple):
    """A way to compute a problem on the ranks of a group. Every rank calls it, with the inputs of the whole problem.

    ``prepare`` gives the call to be timed, and raises ValueError, ImportError or RuntimeError, in words, where there is none.
    ``part`` takes this rank's part of what a call returns. ``alone``: the call is one GPU's, of the whole. ``graphs``: it can
    be captured in a CUDA graph. ``within`` is entered around calls and not timed. ``same`` gives two results that must have
    equal bits. ``launches`` must be in the name of a kernel of a call: one that fell back to this GPU alone has none.
    """

    name: str
    config: str
    origin: Literal["ours", "peer"]
    prepare: Callable[[], Callable[[], Results]]
    part: Callable[[Results], Results] = as_it_is
    alone: bool = False
    graphs: bool = True
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    same: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    launches: str = ""


class Sample(NamedTuple):
    """What the oracle computes of a problem: a smaller ``problem`` with ``inputs``, both for the contract. ``of_reference``
    takes this rank's part of its results, ``of_part`` the same elements of this rank's part of a call's."""

    problem: Any
    inputs: Mapping[str, torch.Tensor]
    of_reference: Callable[[Results], Results]
    of_part: Callable[[Results], Results]
