"""Rows that are sorted by expert already, as expert parallelism dispatches them, in the terms of a routed call."""

from __future__ import annotations

from itertools import pairwise

import torch

from flashmoe_science.ops.calls import is_plain
from flashmoe_science.ops.checks import check_device, checked_tensor


def routing_of_rows(hidden_states: object, offsets: object, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing weights, all one, and the ids [rows, 1]: expert e has the rows from ``offsets[e - 1]`` to ``offsets[e]``.
    Rows past the last have no expert's id. Raises TypeError, ValueError: an argument of ``grouped_moe`` that is not allowed.
    Values of offsets are read on the CPU alone."""
    hidden_states, offsets = checked_tensor("hidden_states", hidden_states), checked_tensor("offsets", offsets)
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states has shape {tuple(hidden_states.shape)}; it must be [rows, H]")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets has dtype {offsets.dtype}; it must be int32 or int64")
    if tuple(offsets.shape) != (experts,):
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}; it must be ({experts},), the row after each expert's last")
    check_device("offsets", offsets, "hidden_states", hidden_states)
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(offsets):
        ends = [0, *offsets.tolist(), hidden_states.shape[0]]
        for expert, (begin, end) in enumerate(pairwise(ends[:-1])):
            if not begin <= end <= ends[-1]:
                raise ValueError(f"offsets[{expert}] is {end}; it must be from {begin} to {ends[-1]}, the number of rows")
    rows = torch.arange(hidden_states.shape[0], dtype=offsets.dtype, device=offsets.device)
    ids = torch.searchsorted(offsets, rows, right=True, out_int32=True)
    return torch.ones((hidden_states.shape[0], 1), dtype=torch.float32, device=offsets.device), ids[:, None]
