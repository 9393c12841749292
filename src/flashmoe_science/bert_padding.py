"""FlashAttention-2's ``bert_padding``: padded sequences as packed ones, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flashmoe_science.ops.checks import check_count, check_device, checked_tensor

__all__ = ["pad_input", "unpad_input"]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The rows of [batch, seqlen, ...] where the mask is not 0, one after another. It waits for the GPU, to count them.

    Args:
        attention_mask: [batch, seqlen], bool or 0 and 1.
        unused_mask: of the same shape, rows that are kept too and not used: no row is in both.

    Returns:
        rows [total, ...], their int64 indices [total] among batch * seqlen, int32 cu_seqlens [batch + 1], the longest length,
        and int32 [batch], the rows of each sequence that are used.

    Raises:
        TypeError, ValueError: what is no dense tensor; a mask of another shape, or on another device.
    """
    _check_tensor("hidden_states", hidden_states, 2)
    shape = tuple(hidden_states.shape[:2])
    masks = {"attention_mask": attention_mask} | ({} if unused_mask is None else {"unused_mask": unused_mask})
    for name, mask in masks.items():
        _check_tensor(name, mask, 2)
        check_device(name, mask, "hidden_states", hidden_states)
        if tuple(mask.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be {shape}, as hidden_states begins")
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    lengths, used = (one.sum(-1, dtype=torch.int32) for one in (kept, attention_mask.bool()))
    indices = kept.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = hidden_states.flatten(0, 1).index_select(0, indices)
    return rows, indices, starts, int(lengths.max()) if lengths.numel() else 0, used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """[batch, seqlen, ...] of rows [total, ...] at the ``indices`` that ``unpad_input`` gave, zeros elsewhere.

    Raises:
        TypeError, ValueError: what is no dense tensor or no integer of at least 0; not as many integer indices as rows.
    """
    _check_tensor("hidden_states", hidden_states, 1)
    _check_tensor("indices", indices, 1)
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        check_count(size, name, 0)
        if size >= 2**31:
            raise ValueError(f"{name} is {size}; it must be below 2**31")
    check_device("indices", indices, "hidden_states", hidden_states)
    if indices.dtype not in (torch.int64, torch.int32) or tuple(indices.shape) != (hidden_states.shape[0],):
        have = f"indices has shape {tuple(indices.shape)} and dtype {indices.dtype}"
        raise ValueError(f"{have}; it must be integers, one for each of the {hidden_states.shape[0]} rows")
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def _check_tensor(name: str, tensor: object, least: int) -> None:
    """Raise unless it is a dense tensor of at least so many dimensions."""
    if (dimensions := checked_tensor(name, tensor).dim()) < least:
        raise ValueError(f"{name} has {dimensions} dimensions; it must have at least {least}")
