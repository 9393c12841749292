"""Appending keys and values to a cache, and rotary embeddings of them and of queries, by PyTorch's operators.

It serves what our kernel does not: tensors on the CPU and GPUs that are not NVIDIA's. Views are as in features.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.packed import owners


class Rotary(NamedTuple):
    """Rotary embeddings: cos and sin [positions, half of the rotated width]; pairs (0, 1), (2, 3).. where ``interleaved``, else
    (i, i + half). ``seqlens`` int32 [batch] is the position of each sequence's first new token, None for its length before."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = True
    seqlens: torch.Tensor | None = None


class NewRows(NamedTuple):
    """What is appended: k and v [batch, heads_kv, new, ...], or packed [1, heads_kv, total, ...] with ``cu_seqlens`` int32
    [batch + 1]."""

    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor | None


class Append(NamedTuple):
    """What a call appends to a cache before it attends: k and v as of NewRows, the tables of a rotary embedding or None,
    ``rotary_seqlens`` and ``interleaved`` as of Rotary; ``moving``: each query by its own position, not all by the first's."""

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    rotary_seqlens: torch.Tensor | None
    interleaved: bool
    moving: bool


class Slots(NamedTuple):
    """Where they go: int32 ``seqlens`` [batch], the lengths before; ``page_table`` or ``batch_idx`` as in Extras."""

    seqlens: torch.Tensor
    page_table: torch.Tensor | None
    batch_idx: torch.Tensor | None


@torch.no_grad()
def append(k_cache: torch.Tensor, v_cache: torch.Tensor, new: NewRows, slots: Slots, rotary: Rotary | None) -> None:
    """Write the new keys, rotated, and the new values behind what each sequence's cache holds, in place. As in our kernel, what
    would lie past the capacity, or in a page or a row of the cache that there is not, is not written."""
    sequence, place, owned = _owners(new.k, new.cu_seqlens)
    if owned is not None:
        sequence, place = sequence[owned], place[owned]
        rows_k, rows_v = (_bytes(one)[0].transpose(0, 1)[owned].view(one.dtype) for one in (new.k, new.v))
    else:
        rows_k, rows_v = (one.transpose(1, 2).flatten(0, 1) for one in (new.k, new.v))
    if rotary is not None:
        first = slots.seqlens if rotary.seqlens is None else rotary.seqlens
        rows_k = _rotated(rows_k, rotary, first.long()[sequence] + place)
    at = slots.seqlens.long()[sequence] + place
    page, at = at // k_cache.shape[2], at % k_cache.shape[2]  # a contiguous cache is one page
    if slots.page_table is not None:
        pages = slots.page_table.shape[1]
        row = slots.page_table[sequence, page.clamp(0, pages - 1)].long()
    else:
        pages = 1
        row = sequence if slots.batch_idx is None else slots.batch_idx.long()[sequence]
    inside = (page >= 0) & (page < pages) & (row >= 0) & (row < k_cache.shape[0])
    for cache, rows in ((k_cache, rows_k), (v_cache, rows_v)):
        _bytes(cache)[row[inside], :, at[inside]] = _bytes(rows.contiguous())[inside]


def rotate_queries(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, rotary: Rotary, seqlens: torch.Tensor, one_position: bool
) -> torch.Tensor:
    """Q [batch, heads, seqlen, head_dim], or packed, rotated at first + i, or all of a sequence at its first position:
    ``rotary.seqlens`` or ``seqlens``, the lengths before."""
    first = seqlens if rotary.seqlens is None else rotary.seqlens
    sequence, place, _ = _owners(q, cu_seqlens)
    position = first.long()[sequence] + (0 if one_position else place)
    if cu_seqlens is not None:
        return _rotated(q[0].transpose(0, 1), rotary, position).transpose(0, 1).unsqueeze(0)
    rows = _rotated(q.transpose(1, 2).flatten(0, 1), rotary, position)
    return rows.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def _owners(tensor: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The sequence of each token, its place in it, and of packed tokens whether a sequence owns it."""
    if cu_seqlens is not None:
        return owners(cu_seqlens, tensor.shape[2])
    batch, length = tensor.shape[0], max(1, tensor.shape[2])
    token = torch.arange(batch * tensor.shape[2], device=tensor.device)
    return token // length, token % length, None


def _rotated(rows: torch.Tensor, rotary: Rotary, position: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, heads, head_dim], each rotated by the angle of its position [tokens]."""
    half = rotary.cos.shape[1]
    position = position.clamp(0, rotary.cos.shape[0] - 1)  # of tokens that belong to no sequence
    cos, sin = (one[position].float().unsqueeze(1) for one in (rotary.cos, rotary.sin))
    wide = rows.float()
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned, rest), -1).to(rows.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as bytes, which PyTorch can index; another as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
