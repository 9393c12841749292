"""Rows that are sorted by expert already, as expert parallelism dispatches them, in the terms of a routed call."""

from __future__ import annotations

from itertools import pairwise

import torch

from flashmoe_science.ops.calls import is_plain


def routing_of_rows(hidden_states: object, offsets: object, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing weights, all one, and the ids [rows, 1] of rows of which expert e has those from ``offsets[e - 1]`` to
    ``offsets[e]``. Rows past the last have the id of no expert.

    Raises:
        TypeError, ValueError: an argument of ``grouped_moe`` that is not allowed. Values of offsets are read on the CPU alone.
    """
    for name, one in (("hidden_states", hidden_states), ("offsets", offsets)):
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"{name} is a {type(one).__name__}; it must be a torch.Tensor")
    assert isinstance(hidden_states, torch.Tensor)
    assert isinstance(offsets, torch.Tensor)
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states has shape {tuple(hidden_states.shape)}; it must be [rows, H]")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets has dtype {offsets.dtype}; it must be int32 or int64")
    if tuple(offsets.shape) != (experts,):
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}; it must be ({experts},), the row after each expert's last")
    if offsets.device != hidden_states.device:
        raise ValueError(f"offsets is on {offsets.device} and hidden_states on {hidden_states.device}; they must be on one")
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(offsets):
        ends = [0, *offsets.tolist(), hidden_states.shape[0]]
        for expert, (begin, end) in enumerate(pairwise(ends[:-1])):
            if not begin <= end <= ends[-1]:
                raise ValueError(f"offsets[{expert}] is {end}; it must be from {begin} to {ends[-1]}, the number of rows")
    rows = torch.arange(hidden_states.shape[0], dtype=offsets.dtype, device=offsets.device)
    ids = torch.searchsorted(offsets, rows, right=True, out_int32=True)
    return torch.ones((hidden_states.shape[0], 1), dtype=torch.float32, device=offsets.device), ids[:, None]
