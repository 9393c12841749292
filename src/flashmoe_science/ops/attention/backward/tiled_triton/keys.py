"""dK and dV: a program for each tile of keys, which loops over the queries of all heads that share its key head.

dV = P^T dO and dK = scale dS^T Q are summed in registers, in one order: head after head, and of each the queries as they come.
"""

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
    store_tile,
)
from flashmoe_science.ops.attention.device.mask_triton import tiles_of_queries
from flashmoe_science.ops.attention.device.product_triton import product
from flashmoe_science.ops.attention.device.strided import Strided, in_units

# Not specialised on: a new batch, length or window must not compile anew.
SIZES = (
    "heads_kv", "group", "seqlen_q", "seqlen_k", "stride_lse", "left", "right", "stride_slopes", "stride_bias_b",
    "stride_bias_h", "stride_bias_m", "stride_bias_n",
)  # fmt: skip


@triton.jit
def _of_keys(tile, KEYS_FIRST: tl.constexpr):
    """A tile of scores as [BLOCK_N, BLOCK_M]."""
    return tile if KEYS_FIRST else tl.trans(tile)


@triton.jit
def _add_queries(
    dk, dv, k, v, q, dout, rows, place, head, first, key, scores, factors, seen,
    WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, KEYS_FIRST: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """dK and dV with what a tile of a head's queries, from ``first`` on, adds. K is [BLOCK_N, BLOCK_D], ``key`` [BLOCK_N]."""
    row = tl.arange(0, traits.BLOCK_M)
    dims, dims_v, queries = tl.arange(0, traits.BLOCK_D), tl.arange(0, traits.BLOCK_DV), place.band.seqlen_q
    q_tile = load_tile(
        q, place.batch, head, place.first_q, first, row, queries, dims, traits.D, traits.BLOCK_D, traits.WIDE
    )  # [BLOCK_M, BLOCK_D]  # fmt: skip
    do_tile = load_tile(
        dout, place.batch, head, place.first_q, first, row, queries, dims_v, traits.DV, traits.BLOCK_DV, traits.WIDE
    )  # [BLOCK_M, BLOCK_DV]  # fmt: skip
    query = first + row
    lse, delta = load_sums(rows, place, head, first, row, do_tile, traits)  # [BLOCK_M]
    if KEYS_FIRST:  # tiles of scores are [BLOCK_N, BLOCK_M]
        a, b, of_v, of_dout = k, q_tile, v, do_tile
        query, key, lse, delta = query[None, :], key[:, None], lse[None, :], delta[None, :]
    else:
        a, b, of_v, of_dout = q_tile, k, do_tile, v
        query, key, lse, delta = query[:, None], key[None, :], lse[:, None], delta[:, None]
    p, slope = probabilities(a, b, query, key, lse, place, scores, factors, traits)
    # In a branch: with a loop for each of the tiles that have a mask and those that have none, registers spill.
    if traits.LEFT or traits.RIGHT:
        if (first < seen.whole) | (first >= seen.beyond):
            p = seen_only(p, query, key, place.band, traits)
    if WITH_DV:
        dv = product(_of_keys(p.to(do_tile.dtype), KEYS_FIRST), do_tile, dv, traits.PRECISION, traits.INTERPRET)
    if WITH_DK:
        dp = product(of_v, tl.trans(of_dout), None, traits.PRECISION, traits.INTERPRET)
        ds = p * (dp - delta)
        if traits.SOFTCAP:
            ds = ds * slope
        dk = product(_of_keys(ds.to(q_tile.dtype), KEYS_FIRST), q_tile, dk, traits.PRECISION, traits.INTERPRET)
    return dk, dv


@triton.jit
def gradients_of_keys(
    first, head_kv, place, q, k, v, dout, dk_out, dv_out, rows, scores, group, KEYS_FIRST: tl.constexpr, traits: tl.constexpr
):  # fmt: skip
    """Store dK and dV of the tile of keys from ``first`` on; of the two those that have a base."""
    BLOCK_N: tl.constexpr = traits.BLOCK_N
    D: tl.constexpr = traits.D
    DV: tl.constexpr = traits.DV
    BLOCK_D: tl.constexpr = traits.BLOCK_D
    BLOCK_DV: tl.constexpr = traits.BLOCK_DV
    WIDE: tl.constexpr = traits.WIDE
    keys = place.band.seqlen_k
    row, dims, dims_v = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_tile = load_tile(k, place.batch, head_kv, place.first_k, first, row, keys, dims, D, BLOCK_D, WIDE)
    v_tile = load_tile(v, place.batch, head_kv, place.first_k, first, row, keys, dims_v, DV, BLOCK_DV, WIDE)
    key = first + row
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    WITH_DK: tl.constexpr = dk_out.base is not None
    WITH_DV: tl.constexpr = dv_out.base is not None
    last = first + BLOCK_N - 1
    seen = tiles_of_queries(first, last, place.band, traits.BLOCK_M, traits.LEFT, traits.RIGHT, traits.PREFIX)
    for head in range(head_kv * group, head_kv * group + group):
        factors = factors_of(scores, place.batch, head, traits)
        for query in tl.range(seen.start, seen.end, traits.BLOCK_M, num_stages=traits.NUM_STAGES):
            dk, dv = _add_queries(
                dk, dv, k_tile, v_tile, q, dout, rows, place, head, query, key, scores, factors, seen,
                WITH_DK, WITH_DV, KEYS_FIRST, traits,
            )  # fmt: skip
    if WITH_DK:
        dk = dk * scores.softmax_scale
        store_tile(dk_out, place.batch, head_kv, place.first_k, first, row, keys, dims, dk, D, BLOCK_D, WIDE)
    if WITH_DV:
        store_tile(dv_out, place.batch, head_kv, place.first_k, first, row, keys, dims_v, dv, DV, BLOCK_DV, WIDE)


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dkdv_triton(
    q_base, k_base, v_base, dout_base, lse_base, delta_base, dk_base, dv_base,
    cu_seqlens_q, cu_seqlens_k, seqused_k, slopes, bias, prefixes, softmax_scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    heads_kv, group, seqlen_q, seqlen_k, stride_lse, left, right,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys of a key head; of the two those whose address is given."""
    q = Strided(q_base, *in_units(stride_qb, stride_qh, stride_qm, UNIT))
    k = Strided(k_base, *in_units(stride_kb, stride_kh, stride_kn, UNIT))
    v = Strided(v_base, *in_units(stride_vb, stride_vh, stride_vn, UNIT))
    dout = Strided(dout_base, *in_units(stride_dob, stride_doh, stride_dom, UNIT))
    dk_out = Strided(dk_base, *in_units(stride_dkb, stride_dkh, stride_dkn, UNIT))
    dv_out = Strided(dv_base, *in_units(stride_dvb, stride_dvh, stride_dvn, UNIT))
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
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    first, head_kv, batch = pid % tiles * BLOCK_N, pid // tiles % heads_kv, pid // tiles // heads_kv
    place = place_of(batch, cu_seqlens_q, cu_seqlens_k, seqused_k, seqlen_q, seqlen_k, scores, traits)
    if first >= place.band.seqlen_k:
        return
    gradients_of_keys(first, head_kv, place, q, k, v, dout, dk_out, dv_out, rows, scores, group, KEYS_FIRST, traits)
