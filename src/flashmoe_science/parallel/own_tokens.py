"""What a step of decoding has on this rank, in one launch: the lengths here, and the new tokens that are written here.

Of N ranks, rank r has token i of a sequence where i % N is r. By PyTorch's operators it takes some fourteen launches, which is
half as long as the attention to a gigabyte of keys on eight GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.launch import next_power_of_2
from flashmoe_science.parallel.peers import launch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element: keys may be e4m3
_BLOCK = 256  # sequences before this one, at a time


@triton.jit
def _copy(x, out, stride, head_stride, place, HEADS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """Copy x [HEADS, WIDTH] of this program's sequence to row ``place`` of out."""
    at = tl.arange(0, PLACES)  # [PLACES]
    source = x + tl.program_id(0).to(tl.int64) * stride + at // WIDTH * head_stride + at % WIDTH
    value = tl.load(source, mask=at < HEADS * WIDTH)
    tl.store(out + place.to(tl.int64) * (HEADS * WIDTH) + at, value, mask=at < HEADS * WIDTH)


@triton.jit(do_not_specialize=["k_stride", "k_head", "v_stride", "v_head", "rank", "ranks"])
def flashmoe_own_tokens(
    lengths, own_lengths, starts, k, v, own_k, own_v, k_stride, k_head, v_stride, v_head, rank, ranks,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PLACES: tl.constexpr, V_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """own_lengths [batch]: of ``lengths`` tokens those of this rank. With new tokens k [batch, HEADS, K] and v [batch, HEADS,
    V] also those of this rank, packed, and where those of each sequence begin: starts [batch + 1]."""
    sequence = tl.program_id(0)
    length = tl.load(lengths + sequence)
    tl.store(own_lengths + sequence, (length + ranks - 1 - rank) // ranks)
    if k is not None:
        place = 0
        for first in range(0, sequence, BLOCK):
            at = first + tl.arange(0, BLOCK)  # [BLOCK]
            others = tl.load(lengths + at, mask=at < sequence, other=0)
            place += tl.sum(((at < sequence) & (others % ranks == rank)).to(tl.int32))
        mine = length % ranks == rank
        if sequence == 0:
            tl.store(starts, 0)
        tl.store(starts + sequence + 1, place + mine.to(tl.int32))
        if mine:
            _copy(k, own_k, k_stride, k_head, place, HEADS, K, K_PLACES)
            _copy(v, own_v, v_stride, v_head, place, HEADS, V, V_PLACES)


Maybe = torch.Tensor | None


def own_tokens(lengths: torch.Tensor, k: Maybe, v: Maybe, rank: int, ranks: int) -> tuple[torch.Tensor, Maybe, Maybe, Maybe]:
    """The lengths here, of at least one sequence; k, v and ``cu_seqlens_k_new`` of this rank's new tokens, of k and v [batch,
    1, heads, ...]. Those of the sequences whose new token is this rank's come first, the rest have no value."""
    own_lengths = torch.empty_like(lengths)
    if k is None or v is None:
        _launch((lengths, own_lengths, *[None] * 5), (0, 0, 0, 0), (rank, ranks), (1, 1, 1))
        return own_lengths, k, v, None
    k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (k, v))
    own_k, own_v = (one.new_empty(len(lengths), *one.shape[2:]) for one in (k, v))
    starts = lengths.new_empty(len(lengths) + 1)
    words = [one.view(_WORDS[one.element_size()]) for one in (k, v, own_k, own_v)]
    strides = k.stride(0), k.stride(2), v.stride(0), v.stride(2)
    _launch((lengths, own_lengths, starts, *words), strides, (rank, ranks), (k.shape[2], k.shape[3], v.shape[3]))
    return own_lengths, own_k, own_v, starts


def _launch(
    tensors: tuple[torch.Tensor | None, ...], strides: tuple[int, ...], ranks: tuple[int, int], sizes: tuple[int, int, int]
) -> None:
    heads, *widths = sizes
    constexprs = (*sizes, *(next_power_of_2(heads * width) for width in widths), _BLOCK)
    lengths = tensors[0]
    assert lengths is not None
    launch(flashmoe_own_tokens, (len(lengths), 1, 1), tensors, (*strides, *ranks), constexprs)
