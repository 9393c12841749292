"""dQ: a program for each tile of queries of a head, which loops over the keys that they see. dQ = scale dS K is summed in
registers, in the order of the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.backward.tiled_triton.keys import SIZES
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
    store_tile,
)
from flashmoe_science.ops.attention.device.mask_triton import tiles_of_keys
from flashmoe_science.ops.attention.device.product_triton import product
from flashmoe_science.ops.attention.device.strided import Strided, in_units


@triton.jit
def _add_keys(
    dq, q, dout, lse, delta, k, v, place, head_kv, first, query, scores, factors, MASKED: tl.constexpr, traits: tl.constexpr
):  # fmt: skip
    """dQ with what a tile of keys, from ``first`` on, adds. Q is [BLOCK_M, BLOCK_D], ``query`` and the sums [BLOCK_M]."""
    row = tl.arange(0, traits.BLOCK_N)
    dims, dims_v, keys = tl.arange(0, traits.BLOCK_D), tl.arange(0, traits.BLOCK_DV), place.band.seqlen_k
    k_tile = load_tile(
        k, place.batch, head_kv, place.first_k, first, row, keys, dims, traits.D, traits.BLOCK_D, traits.WIDE
    )  # [BLOCK_N, BLOCK_D]  # fmt: skip
    v_tile = load_tile(
        v, place.batch, head_kv, place.first_k, first, row, keys, dims_v, traits.DV, traits.BLOCK_DV, traits.WIDE
    )  # [BLOCK_N, BLOCK_DV]  # fmt: skip
    key = first + row
    p, slope = probabilities(
        q, k_tile, query[:, None], key[None, :], lse[:, None], place, scores, factors, traits
    )  # [BLOCK_M, BLOCK_N]  # fmt: skip
    if MASKED:
        p = seen_only(p, query[:, None], key[None, :], place.band, traits)
    dp = product(dout, tl.trans(v_tile), None, traits.PRECISION, traits.INTERPRET)  # [BLOCK_M, BLOCK_N]
    ds = p * (dp - delta[:, None])
    if traits.SOFTCAP:
        ds = ds * slope
    return product(ds.to(k_tile.dtype), k_tile, dq, traits.PRECISION, traits.INTERPRET)


@triton.jit
def gradient_of_queries(first, head, group, place, q, k, v, dout, dq_out, rows, scores, traits: tl.constexpr):
    """Store dQ of the tile of queries from ``first`` on."""
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    BLOCK_N: tl.constexpr = traits.BLOCK_N
    D: tl.constexpr = traits.D
    DV: tl.constexpr = traits.DV
    BLOCK_D: tl.constexpr = traits.BLOCK_D
    BLOCK_DV: tl.constexpr = traits.BLOCK_DV
    NUM_STAGES: tl.constexpr = traits.NUM_STAGES
    WIDE: tl.constexpr = traits.WIDE
    queries = place.band.seqlen_q
    row, dims, dims_v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_tile = load_tile(q, place.batch, head, place.first_q, first, row, queries, dims, D, BLOCK_D, WIDE)
    do_tile = load_tile(dout, place.batch, head, place.first_q, first, row, queries, dims_v, DV, BLOCK_DV, WIDE)
    query = first + row
    lse, delta = load_sums(rows, place, head, first, row, do_tile, traits)
    factors = factors_of(scores, place.batch, head, traits)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    seen = tiles_of_keys(
        first, tl.minimum(first + BLOCK_M, queries) - 1, place.band, BLOCK_N, traits.LEFT, traits.RIGHT, traits.PREFIX
    )  # fmt: skip
    head_kv = head // group
    if traits.LEFT:
        for key in tl.range(seen.start, seen.whole, BLOCK_N, num_stages=NUM_STAGES):
            dq = _add_keys(
                dq, q_tile, do_tile, lse, delta, k, v, place, head_kv, key, query, scores, factors, True, traits
            )  # fmt: skip
    for key in tl.range(seen.whole, seen.beyond, BLOCK_N, num_stages=NUM_STAGES):
        dq = _add_keys(
            dq, q_tile, do_tile, lse, delta, k, v, place, head_kv, key, query, scores, factors, False, traits
        )  # fmt: skip
    for key in tl.range(seen.beyond, seen.end, BLOCK_N, num_stages=NUM_STAGES):  # a diagonal, or the last keys
        dq = _add_keys(
            dq, q_tile, do_tile, lse, delta, k, v, place, head_kv, key, query, scores, factors, True, traits
        )  # fmt: skip
    dq = dq * scores.softmax_scale
    store_tile(dq_out, place.batch, head, place.first_q, first, row, queries, dims, dq, D, BLOCK_D, WIDE)


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dq_triton(
    q_base, k_base, v_base, dout_base, lse_base, delta_base, dq_base,
    cu_seqlens_q, cu_seqlens_k, seqused_k, slopes, bias, prefixes, softmax_scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    heads_kv, group, seqlen_q, seqlen_k, stride_lse, left, right,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries of a head."""
    q = Strided(q_base, *in_units(stride_qb, stride_qh, stride_qm, UNIT))
    k = Strided(k_base, *in_units(stride_kb, stride_kh, stride_kn, UNIT))
    v = Strided(v_base, *in_units(stride_vb, stride_vh, stride_vn, UNIT))
    dout = Strided(dout_base, *in_units(stride_dob, stride_doh, stride_dom, UNIT))
    dq_out = Strided(dq_base, *in_units(stride_dqb, stride_dqh, stride_dqm, UNIT))
    scores = Scores(
        softmax_scale, softcap, left, right, prefixes, Strided(slopes, stride_slopes, None),
        Strided(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
    )  # fmt: skip
    rows = Rows(lse_base, delta_base, stride_lse, heads_kv * group, cu_seqlens_q, Strided(None, None, None), None)
    PREFIX: tl.constexpr = prefixes is not None
    traits: tl.constexpr = Traits(
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, NUM_STAGES, LEFT, RIGHT, PREFIX, TOPLEFT, SOFTCAP, BIAS, WIDE,
        PRECISION, INTERPRET,
    )  # fmt: skip
    tiles, heads = tl.cdiv(seqlen_q, BLOCK_M), heads_kv * group
    pid = tl.program_id(0)
    tile, head, batch = pid % tiles, pid // tiles % heads, pid // tiles // heads
    if RIGHT:  # the last rows see the most keys: start them first
        tile = tiles - 1 - tile
    first = tile * BLOCK_M
    place = place_of(batch, cu_seqlens_q, cu_seqlens_k, seqused_k, seqlen_q, seqlen_k, scores, traits)
    if first >= place.band.seqlen_q:
        return
    gradient_of_queries(first, head, group, place, q, k, v, dout, dq_out, rows, scores, traits)
