"""What a step of decoding has on this rank, in one launch: the lengths here, and the new tokens that are written here.

Of N ranks, rank r has token i of a sequence where i % N is r. By PyTorch's operators it takes some fourteen launches, which is
half as long as the attention to a gigabyte of keys on eight GPUs. Written into the caches here, new tokens also leave the call
that follows to the short path of calls that are alike; only those that are rotated on the way are packed for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.launch import next_power_of_2
from flashmoe_science.parallel.peers import launch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element: keys may be e4m3
_BLOCK = 256  # sequences before this one, at a time
Maybe = torch.Tensor | None


@triton.jit
def _copy(x, to, stride, head_stride, first, to_head_stride, HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """Copy x [HEADS, WIDTH] of this program's sequence to ``to``, from element ``first`` on."""
    at = tl.arange(0, PLACES)  # [PLACES]
    source = x + tl.program_id(0).to(tl.int64) * stride + at // WIDTH * head_stride + at % WIDTH
    value = tl.load(source, mask=at < HEADS * WIDTH)
    tl.store(to + first + at // WIDTH * to_head_stride + at % WIDTH, value, mask=at < HEADS * WIDTH)


@triton.jit(do_not_specialize=[f"{x}_{of}" for x in "kv" for of in ("stride", "head", "to_stride", "to_row", "to_head")] + [
    "table_stride", "pages", "rows", "caches", "rank", "ranks"
])  # fmt: skip
def flashmoe_own_tokens(
    lengths, own_lengths, starts, table, k, v, to_k, to_v,
    k_stride, k_head, k_to_stride, k_to_row, k_to_head, v_stride, v_head, v_to_stride, v_to_row, v_to_head,
    table_stride, pages, rows, caches, rank, ranks,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PLACES: tl.constexpr, V_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """own_lengths [batch]: of ``lengths`` tokens those of this rank. Its new tokens of k [batch, HEADS, K] and v [batch, HEADS,
    V] are written into caches of ``rows`` tokens, or into pages of as many by ``table``, and counted; with ``starts`` [batch +
    1] they are packed, and not counted. What has no room is not written."""
    sequence = tl.program_id(0)
    length = tl.load(lengths + sequence)
    written: tl.constexpr = k is not None and starts is None
    tl.store(own_lengths + sequence, (length + ranks - 1 - rank + (1 if written else 0)) // ranks)
    if k is not None:
        mine = (length >= 0) & (length % ranks == rank)
        row, at = sequence, length // ranks
        if starts is not None:
            row, at = 0, 0
            for first in range(0, sequence, BLOCK):
                place = first + tl.arange(0, BLOCK)  # [BLOCK]
                others = tl.load(lengths + place, mask=place < sequence, other=0)
                row += tl.sum(((place < sequence) & (others >= 0) & (others % ranks == rank)).to(tl.int32))
            if sequence == 0:
                tl.store(starts, 0)
            tl.store(starts + sequence + 1, row + mine.to(tl.int32))
        elif table is not None:
            page, at = at // rows, at % rows
            mine = mine & (page < pages)
            row = tl.load(table + sequence.to(tl.int64) * table_stride + page, mask=mine, other=-1)
            mine = mine & (row >= 0) & (row < caches)
        else:
            mine = mine & (at < rows)
        if mine:
            in_k, in_v = tl.cast(row, tl.int64) * k_to_stride, tl.cast(row, tl.int64) * v_to_stride
            _copy(k, to_k, k_stride, k_head, in_k + tl.cast(at, tl.int64) * k_to_row, k_to_head, HEADS, K, K_PLACES)
            _copy(v, to_v, v_stride, v_head, in_v + tl.cast(at, tl.int64) * v_to_row, v_to_head, HEADS, V, V_PLACES)


def can_write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: Maybe) -> bool:
    """Whether ``write_own`` serves these caches, and new tokens of their heads; else the call that follows does, or refuses."""
    alike = k_cache.shape[:2] == v_cache.shape[:2] and (table is not None or len(k_cache) >= len(k))
    every = (k, v, k_cache, v_cache)
    plain = all(one.stride(-1) == 1 and one.device == k.device and max(one.stride()) < 2**31 for one in every)
    return alike and plain and (k.dtype, v.dtype) == (k_cache.dtype, v_cache.dtype)


def write_own(
    lengths: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: Maybe,
    rank: int, ranks: int,
) -> torch.Tensor:  # fmt: skip
    """Write the new tokens [batch, 1, heads, ...] of this rank into its caches [caches, rows, heads, ...], or into their pages.
    Returns the lengths here with them, of at least one sequence."""
    own_lengths = torch.empty_like(lengths)
    pages, of_table = (1, 0) if table is None else (table.shape[1], table.stride(0))
    room = (of_table, pages, k_cache.shape[1], k_cache.shape[0])
    _launch((lengths, own_lengths, None, table), (k, v), (k_cache, v_cache), room, (rank, ranks))
    return own_lengths


def own_tokens(lengths: torch.Tensor, k: Maybe, v: Maybe, rank: int, ranks: int) -> tuple[torch.Tensor, Maybe, Maybe, Maybe]:
    """The lengths here, of at least one sequence; k, v and ``cu_seqlens_k_new`` of this rank's new tokens, of k and v [batch,
    1, heads, ...]. Those of the sequences whose new token is this rank's come first, the rest have no value."""
    own_lengths, nothing = torch.empty_like(lengths), (0, 0, 0, 0)
    if k is None or v is None:
        _launch((lengths, own_lengths, None, None), None, None, nothing, (rank, ranks))
        return own_lengths, k, v, None
    starts, new = lengths.new_empty(len(lengths) + 1), [one if one.stride(-1) == 1 else one.contiguous() for one in (k, v)]
    own_k, own_v = (one.new_empty(len(lengths), 1, *one.shape[2:]) for one in new)
    _launch((lengths, own_lengths, starts, None), (new[0], new[1]), (own_k, own_v), nothing, (rank, ranks))
    return own_lengths, own_k[:, 0], own_v[:, 0], starts


def _launch(
    tables: tuple[Maybe, ...], new: tuple[torch.Tensor, torch.Tensor] | None, to: tuple[torch.Tensor, torch.Tensor] | None,
    room: tuple[int, ...], ranks: tuple[int, int],
) -> None:  # fmt: skip
    words, strides, (heads, *widths) = [None] * 4, [0] * 10, (1, 1, 1)
    if new is not None and to is not None:
        words = [one.view(_WORDS[one.element_size()]) for one in (*new, *to)]  # type: ignore[misc]
        strides = [stride for x, out in zip(new, to, strict=True) for stride in (x.stride(0), x.stride(2), *out.stride()[:3])]
        heads, *widths = new[0].shape[2], new[0].shape[3], new[1].shape[3]
    lengths, constexprs = tables[0], (heads, *widths, *(next_power_of_2(heads * width) for width in widths), _BLOCK)
    assert lengths is not None
    launch(flashmoe_own_tokens, (len(lengths), 1, 1), (*tables, *words), (*strides, *room, *ranks), constexprs)
