"""The kernel: programs of tiles of keys, for dK and dV, and of tiles of queries, for dQ; each sums delta by itself."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.backward.tiled_triton.keys import gradients_of_keys
from flashmoe_science.ops.attention.backward.tiled_triton.queries import gradient_of_queries
from flashmoe_science.ops.attention.backward.tiled_triton.tile import Rows, Scores, Traits, place_of
from flashmoe_science.ops.attention.device.strided import Strided, in_units

# Not specialised on: a new batch, length or window must not compile anew.
SIZES = ("heads_kv", "group", "seqlen_q", "seqlen_k", "left", "right", "of_keys")


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_short_triton(
    q_base, k_base, v_base, dout_base, out_base, lse_base, dlse, dq_base, dk_base, dv_base, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_ob, stride_oh, stride_om,
    stride_dqb, stride_dqh, stride_dqm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    heads_kv, group, seqlen_q, seqlen_k, left, right, of_keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEYS_M: tl.constexpr, KEYS_N: tl.constexpr, QUERIES_M: tl.constexpr, QUERIES_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, INTERPRET: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """The first ``of_keys`` programs store dK and dV of a tile of KEYS_N keys of a key head, from KEYS_M queries at a time, the
    others dQ of a tile of QUERIES_M queries of a head, from QUERIES_N keys; each of the three where it has an address."""
    q = Strided(q_base, *in_units(stride_qb, stride_qh, stride_qm, UNIT))
    k = Strided(k_base, *in_units(stride_kb, stride_kh, stride_kn, UNIT))
    v = Strided(v_base, *in_units(stride_vb, stride_vh, stride_vn, UNIT))
    dout = Strided(dout_base, *in_units(stride_dob, stride_doh, stride_dom, UNIT))
    out = Strided(out_base, *in_units(stride_ob, stride_oh, stride_om, UNIT))
    absent = Strided(None, None, None)
    scores = Scores(softmax_scale, None, left, right, None, absent, absent)
    heads = heads_kv * group
    rows = Rows(lse_base, None, seqlen_q, heads, None, out, dlse)
    of_tiles: tl.constexpr = Traits(
        D, DV, BLOCK_D, BLOCK_DV, KEYS_M, KEYS_N, NUM_STAGES, False, RIGHT, False, TOPLEFT, False, "none", WIDE, "tf32",
        INTERPRET,
    )  # fmt: skip
    of_rows: tl.constexpr = Traits(
        D, DV, BLOCK_D, BLOCK_DV, QUERIES_M, QUERIES_N, NUM_STAGES, False, RIGHT, False, TOPLEFT, False, "none", WIDE, "tf32",
        INTERPRET,
    )  # fmt: skip
    number = tl.program_id(0)
    if number < of_keys:
        tiles = tl.cdiv(seqlen_k, KEYS_N)
        first, head_kv, batch = number % tiles * KEYS_N, number // tiles % heads_kv, number // tiles // heads_kv
        place = place_of(batch, None, None, None, seqlen_q, seqlen_k, scores, of_tiles)
        dk = Strided(dk_base, *in_units(stride_dkb, stride_dkh, stride_dkn, UNIT))
        dv = Strided(dv_base, *in_units(stride_dvb, stride_dvh, stride_dvn, UNIT))
        gradients_of_keys(first, head_kv, place, q, k, v, dout, dk, dv, rows, scores, group, KEYS_FIRST, of_tiles)
    elif dq_base is not None:
        tiles = tl.cdiv(seqlen_q, QUERIES_M)
        number -= of_keys
        tile, head, batch = number % tiles, number // tiles % heads, number // tiles // heads
        if RIGHT:  # the last rows see the most keys: start them first
            tile = tiles - 1 - tile
        place = place_of(batch, None, None, None, seqlen_q, seqlen_k, scores, of_rows)
        dq = Strided(dq_base, *in_units(stride_dqb, stride_dqh, stride_dqm, UNIT))
        gradient_of_queries(tile * QUERIES_M, head, group, place, q, k, v, dout, dq, rows, scores, of_rows)
