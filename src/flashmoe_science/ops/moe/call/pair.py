"""Gates and ups as two tensors, as in torchtitan, and the joined tensor that kernels take."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.checks import checked_tensor

Pair = tuple[torch.Tensor, torch.Tensor]  # all gates, all ups, each [E, I, H]


def checked_pair(pair: Any, down_proj: object, transposed: object, interleaved: object) -> Pair:
    """The gates and the ups, as given. Raises TypeError, ValueError: a ``gate_up_proj`` of ``fused_moe`` that is not a pair of
    like tensors, or not as wide as ``down_proj``; ``interleaved``."""
    if len(pair) != 2:
        raise ValueError(f"gate_up_proj has {len(pair)} tensors; it must be one tensor, or a pair of gates and of ups")
    for nth, one in enumerate(pair):
        if checked_tensor(f"gate_up_proj[{nth}]", one).dim() != 3:
            raise ValueError(f"gate_up_proj[{nth}] has shape {tuple(one.shape)}; it must have three dimensions, experts first")
    gate, up = pair
    for name, of_gate, of_up in (
        ("shape", tuple(gate.shape), tuple(up.shape)), ("dtype", gate.dtype, up.dtype), ("device", gate.device, up.device)
    ):  # fmt: skip
        if of_gate != of_up:
            raise ValueError(f"gate_up_proj[0] has {name} {of_gate} and gate_up_proj[1] {of_up}; they must be the same")
    if interleaved:
        raise ValueError("interleaved is True and gate_up_proj is a pair of gates and ups; it must be False")
    width, place = gate.shape[2 if transposed else 1], 1 if transposed else 2
    if isinstance(down_proj, torch.Tensor) and down_proj.dim() == 3 and down_proj.shape[place] != width:
        raise ValueError(
            f"gate_up_proj is a pair of {width} gates and ups an expert and down_proj has {down_proj.shape[place]} columns; "
            "there must be as many"
        )
    return gate, up


def follow(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether each expert's ups [I, H] follow its gates in memory, so that joining needs no copy."""
    if gate.stride() != up.stride() or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr():
        return False
    return up.storage_offset() - gate.storage_offset() == gate.shape[1] * gate.stride(1)


def joined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[E, 2I, H] of gates and ups that need no gradient: a view if ups follow gates, else a copy."""
    experts, width, dim = gate.shape
    return gate.as_strided((experts, 2 * width, dim), gate.stride()) if follow(gate, up) else copied(gate, up)


def copied(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[E, 2I, H] of gates and ups, in their memory order; differentiable."""
    return torch.cat((gate.mT, up.mT), 2).mT if gate.stride(1) == 1 < gate.stride(2) else torch.cat((gate, up), 1)
