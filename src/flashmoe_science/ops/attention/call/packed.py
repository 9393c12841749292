"""Index arithmetic of packed sequences, on the device that holds their lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch


def owners(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sequence of each of ``total`` packed tokens, its place there, and whether any sequence owns it. ``cu_seqlens``:
    integers [batch + 1], where each sequence begins, and the end of the last. Returns int64 sequence [total], from 0 to batch -
    1; int64 place [total], 0 where no sequence owns the token; bool [total]."""
    starts = cu_seqlens.long()
    token = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    owned = sequence < starts.shape[0] - 1
    sequence = torch.where(owned, sequence, 0)
    return sequence, torch.where(owned, token - starts[sequence], 0), owned


class UsedRows(NamedTuple):
    """How to pack only the used rows, the first few of each packed sequence.

    ``cu_seqlens`` int32 [batch + 1] is of the used rows and ``source`` int64 [total] the row to take for each; ``place`` int64
    [total] leads back, where ``used`` bool [total] is True.
    """

    cu_seqlens: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor
    used: torch.Tensor


def used_rows(cu_seqlens: torch.Tensor, seqused: torch.Tensor, total: int) -> UsedRows:
    """The first ``seqused`` int32 [batch] rows of each sequence, moved together; ``total`` rows in all, used or not."""
    starts = torch.zeros_like(cu_seqlens)
    starts[1:] = torch.cumsum(torch.minimum(seqused, cu_seqlens[1:] - cu_seqlens[:-1]), 0)
    sequence, place, owned = owners(starts, total)
    source = torch.where(owned, cu_seqlens.long()[sequence] + place, 0)
    sequence, place, owned = owners(cu_seqlens, total)
    used = owned & (place < seqused.long()[sequence])
    return UsedRows(starts, source, torch.where(used, starts.long()[sequence] + place, 0), used)


def chunk_mask(
    chunk: int,
    rows: int,
    columns: int,
    of_q: torch.Tensor | int,
    of_k: torch.Tensor | int,
    leftpad: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Which keys are in the chunk of each query's position: bool [batch or 1, 1, rows, columns].

    Positions count from the first valid key, chunks of ``chunk`` positions from 0 (the chunked attention of Llama 4). Query i
    is at i + of_k - of_q. The lengths are one for all sequences, or int32 [batch], and include what ``leftpad`` int32 [batch]
    hides.
    """
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    of_q, of_k, pad = (
        one.long()[:, None, None] if isinstance(one, torch.Tensor) else one
        for one in (of_q, of_k, 0 if leftpad is None else leftpad)
    )
    position = row + of_k - of_q - pad
    inside = (column - pad).div(chunk, rounding_mode="floor") == position.div(chunk, rounding_mode="floor")
    return inside[:, None] if inside.dim() == 3 else inside[None, None]
