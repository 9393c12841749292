"""dBias: a program for each tile of the bias, which sums the gradients of all scores that it was added to, in one order."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.backward.tiled_triton.tile import (
    Rows,
    Scores,
    Traits,
    factors_of,
    load_sums,
    load_tile,
    place_of,
    probabilities,
    seen_only,
)
from flashmoe_science.ops.attention.device.product_triton import product
from flashmoe_science.ops.attention.device.strided import Strided, in_units

SIZES = (
    "heads_kv", "group", "seqlen_q", "seqlen_k", "stride_lse", "left", "right", "stride_bias_b", "stride_bias_h",
    "stride_bias_m", "stride_bias_n", "batches", "tiles_m", "tiles_n", "own_batches", "own_heads", "own_tiles_m", "own_tiles_n",
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dbias_triton(
    q_base, k_base, v_base, dout_base, lse_base, delta_base, dbias, bias, prefixes, softmax_scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    heads_kv, group, seqlen_q, seqlen_k, stride_lse, left, right,
    batches, tiles_m, tiles_n, own_batches, own_heads, own_tiles_m, own_tiles_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr,
):  # fmt: skip
    """dBias [batches or 1, heads or 1, Sq or 1 (ONE_ROW), Sk or 1 (ONE_COLUMN)] of a tile, which is of ``own_batches`` batches,
    ``own_heads`` heads and so on: one each, or all."""
    q = Strided(q_base, *in_units(stride_qb, stride_qh, stride_qm, UNIT))
    k = Strided(k_base, *in_units(stride_kb, stride_kh, stride_kn, UNIT))
    v = Strided(v_base, *in_units(stride_vb, stride_vh, stride_vn, UNIT))
    dout = Strided(dout_base, *in_units(stride_dob, stride_doh, stride_dom, UNIT))
    scores = Scores(
        softmax_scale, softcap, left, right, prefixes, Strided(None, None, None),
        Strided(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
    )  # fmt: skip
    heads = heads_kv * group
    rows = Rows(lse_base, delta_base, stride_lse, heads, None, Strided(None, None, None), None)
    PREFIX: tl.constexpr = prefixes is not None
    traits: tl.constexpr = Traits(
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, NUM_STAGES, LEFT, RIGHT, PREFIX, TOPLEFT, SOFTCAP, BIAS, WIDE,
        PRECISION, INTERPRET,
    )  # fmt: skip
    across, down = tiles_n // own_tiles_n, tiles_m // own_tiles_m  # tiles of dBias
    pid, all_heads = tl.program_id(0), heads // own_heads
    tile_n, tile_m = pid % across, pid // across % down
    of_head, of_batch = pid // (across * down) % all_heads, pid // (across * down) // all_heads
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for number in range(own_batches * own_heads * own_tiles_m * own_tiles_n):
        first_k, rest = (tile_n + number % own_tiles_n) * BLOCK_N, number // own_tiles_n
        first_q, rest = (tile_m + rest % own_tiles_m) * BLOCK_M, rest // own_tiles_m
        head, batch = of_head + rest % own_heads, of_batch + rest // own_heads
        place = place_of(batch, None, None, None, seqlen_q, seqlen_k, scores, traits)
        query_row = tl.cast(first_q, tl.int64)
        q_tile = load_tile(q, place.batch, head, 0, query_row, row, seqlen_q, dims, D, BLOCK_D, WIDE)
        do_tile = load_tile(dout, place.batch, head, 0, query_row, row, seqlen_q, dims_v, DV, BLOCK_DV, WIDE)
        head_kv, key_row = head // group, tl.cast(first_k, tl.int64)
        k_tile = load_tile(k, place.batch, head_kv, 0, key_row, column, seqlen_k, dims, D, BLOCK_D, WIDE)
        v_tile = load_tile(v, place.batch, head_kv, 0, key_row, column, seqlen_k, dims_v, DV, BLOCK_DV, WIDE)
        lse, delta = load_sums(rows, place, head, first_q, row, do_tile, traits)
        factors = factors_of(scores, place.batch, head, traits)
        query, key = (first_q + row)[:, None], (first_k + column)[None, :]
        p, _ = probabilities(q_tile, k_tile, query, key, lse[:, None], place, scores, factors, traits)
        p = seen_only(p, query, key, place.band, traits)
        total += p * (product(do_tile, tl.trans(v_tile), None, PRECISION, INTERPRET) - delta[:, None])
    height, width = 1 if ONE_ROW else seqlen_q, 1 if ONE_COLUMN else seqlen_k
    corner = dbias + (tl.cast(of_batch, tl.int64) * all_heads + of_head) * height * width
    at_row, at_column = tile_m * BLOCK_M + row, tile_n * BLOCK_N + column
    if ONE_ROW:
        total = tl.sum(total, 0)[None, :]
        at_row = tl.arange(0, 1)
    if ONE_COLUMN:
        total = tl.sum(total, 1)[:, None]
        at_column = tl.arange(0, 1)
    at = at_row.to(tl.int64)[:, None] * width + at_column[None, :]
    inside = (at_row < height)[:, None] & (at_column < width)[None, :]
    tl.store(corner + at, total.to(dbias.dtype.element_ty), mask=inside)
