"""A consumer's step of chunk_gluon_sm90: S = Q K^T of a tile of keys during O += P V of the tile before; masks, softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.attention.device import sm90
from flashmoe_science.ops.attention.device.kv_pipeline import RowState, release_v, start_products
from flashmoe_science.ops.attention.device.mask import columns_before
from flashmoe_science.ops.attention.device.output import LAZY_ABOVE, rescale_rows, to_operand, wait_for_output
from flashmoe_science.ops.attention.device.softcap import capped
from flashmoe_science.ops.attention.device.softmax import add_to_sums, softmax_step

ROWS = gl.constexpr(sm90.ROWS)


class Window(NamedTuple):
    """A window's left end for a consumer's rows: the first key of each row, [BLOCK_M], and the tiles of keys that all of them
    see, from ``low`` to before ``high``."""

    first: Any
    low: Any
    high: Any


@gluon.jit
def keys_back(left, right):
    """Keys that a query sees before its last one: ``right`` of them after the key at its own place, unless None are."""
    if right is None:
        return left
    else:
        return left + right


@gluon.jit
def row_window(first_query, rows, end, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The Window of a consumer's rows, whose keys end before ``end``, [BLOCK_M]."""
    to_first = rows.diagonal - keys_back(rows.left, rows.right)
    first = first_query + gl.arange(0, ROWS, end.type.layout) % QUERIES + to_first  # [BLOCK_M]
    last_query = gl.minimum(first_query + QUERIES, rows.seqlen_q) - 1
    low = (gl.maximum(last_query + to_first, 0) + BLOCK_N - 1) // BLOCK_N
    whole = rows.seqlen_k
    if CAUSAL:
        whole = gl.maximum(gl.minimum(first_query + rows.diagonal + 1, rows.seqlen_k), 0)
    return Window(first, low, whole // BLOCK_N)


@gluon.jit
def mask(s, tile, low, end):
    """Scores with -inf where a key is not before its row's ``end``, or is of a tile before ``low``."""
    end = gl.where(tile < low, 0, end - tile * s.shape[1])
    return gl.where(columns_before(s, gl.expand_dims(end, 1)), s, float("-inf"))


@gluon.jit
def mask_window(s, tile, first, end):
    """Scores with -inf where a key is before its row's ``first`` or not before its ``end``."""
    first, end = gl.expand_dims(first - tile * s.shape[1], 1), gl.expand_dims(end - tile * s.shape[1], 1)
    return gl.where(columns_before(s, end) & (columns_before(s, first) == 0), s, float("-inf"))


@gluon.jit
def tile_step(
    tile, buffers, barriers, scales, low, end, window, state, kv,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr, TRAITS: gl.constexpr,
):  # fmt: skip
    """Attend to a tile of keys: its S is computed during P V of the one before, and its softmax during P V. See prefill_sm90's
    ``tile_step`` for the wait on a barrier that has long completed."""
    o = state.o
    # As measured: 11 to 15% slower without splits.
    LAZY: gl.constexpr = TRAITS.SPLIT and (len(o) == 2 or o[0].shape[1] > LAZY_ABOVE)
    s, o_tokens, kv = start_products(CONSUMER, buffers, barriers, state.p, o, kv, None)  # s: [BLOCK_M, BLOCK_N]
    if scales.cap is not None:
        s = capped(s, scales.cap)
    if window is not None:
        if (tile < window.low) | (tile >= window.high):
            s = mask_window(s, tile, window.first, end)
    elif MASKED:
        s = mask(s, tile, low, end)
    p32, row_max, rescale = softmax_step(s, state.max, scales.log2, MASKED, LAZY)
    row_sum, lost = add_to_sums(state.sum, state.lost, p32, rescale, TRAITS.COMPENSATED)
    mbarrier.wait(barriers.v_full.index(kv.v.stage), kv.v.phase)
    o = wait_for_output(o_tokens)  # [BLOCK_M, width]
    kv = release_v(barriers, kv)
    o = rescale_rows(o, rescale, LAZY)
    return RowState(to_operand(p32, o, buffers.v[0].dtype), o, row_max, row_sum, lost), kv
