"""What the kernels share: loads and stores of tiles, and of a tile of scores [queries, keys] the probabilities, anew from Q, K
and the log-sum-exp. ``query`` [queries, 1] and ``key`` [1, keys] are numbers within a sequence."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.bias_triton import bias_log2
from flashmoe_science.ops.attention.device.mask_triton import band_of, in_band
from flashmoe_science.ops.attention.device.output_triton import lse_rows
from flashmoe_science.ops.attention.device.product_triton import product
from flashmoe_science.ops.attention.device.rows_triton import load_rows
from flashmoe_science.ops.attention.device.sequences import Sequences, keys_of, packed_rows
from flashmoe_science.ops.attention.device.softcap_triton import tanh
from flashmoe_science.ops.attention.device.strided import Strided

# What a build is specialised on.
# D, DV: widths of heads, padded to BLOCK_D and BLOCK_DV. BLOCK_M, BLOCK_N: queries and keys of a tile. NUM_STAGES: tiles on
# their way. LEFT, RIGHT: whether a window ends there. PREFIX: whether every query sees one. TOPLEFT: where the diagonal begins.
# WIDE: a tile may span 2^31 elements.
Traits = namedtuple(
    "Traits", "D DV BLOCK_D BLOCK_DV BLOCK_M BLOCK_N NUM_STAGES LEFT RIGHT PREFIX TOPLEFT SOFTCAP BIAS WIDE PRECISION INTERPRET"
)


class Scores(NamedTuple):
    """What happens to scores: ``slopes`` [batch, heads] of ALiBi, ``bias`` [B, H, Sq, Sk], None where absent; ``prefixes``
    [batch]; a window reaches ``left`` and ``right`` keys from its query's diagonal."""

    softmax_scale: tl.tensor
    softcap: tl.tensor
    left: tl.tensor
    right: tl.tensor
    prefixes: tl.tensor
    slopes: Strided
    bias: Strided


class Rows(NamedTuple):
    """The log-sum-exp and delta of all heads' queries, [B, H, Sq], or [H, total] where ``cu_seqlens_q`` is given; ``stride``
    from a head to the next. With ``out`` in place of delta each tile computes it: rowsum(dO O), less ``dlse`` where given."""

    lse: tl.tensor
    delta: tl.tensor
    stride: tl.tensor
    heads: tl.tensor
    cu_seqlens_q: tl.tensor
    out: Strided
    dlse: tl.tensor


class Place(NamedTuple):
    """A sequence: its number, the first rows of its queries and keys, and its mask."""

    batch: tl.tensor
    first_q: tl.tensor
    first_k: tl.tensor
    band: tl.tensor


class Factors(NamedTuple):
    """The start of a head's bias, or its ALiBi slope in base 2; and the scale of its scores."""

    bias: tl.tensor
    slope: tl.tensor
    scale_log2: tl.tensor
    cap_log2: tl.tensor
    over_cap: tl.tensor


@triton.jit
def place_of(batch, cu_seqlens_q, cu_seqlens_k, seqused_k, seqlen_q, seqlen_k, scores, traits: tl.constexpr):
    """The Place of a sequence."""
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, seqused_k, None, None, None, None, seqlen_q, seqlen_k, seqlen_k, 0
    )  # fmt: skip
    first_q, queries = packed_rows(cu_seqlens_q, batch, seqlen_q)
    first_k, keys, _ = keys_of(sequences, batch)
    band = band_of(batch, queries, keys, scores.left, scores.right, scores.prefixes, traits.TOPLEFT)
    return Place(tl.cast(batch, tl.int64), tl.cast(first_q, tl.int64), tl.cast(first_k, tl.int64), band)


@triton.jit
def factors_of(scores, batch, head, traits: tl.constexpr):
    """The Factors of a head of a sequence."""
    bias, slope = 0, 0.0
    if traits.BIAS == "alibi":
        slope = tl.load(scores.slopes.base + batch * scores.slopes.stride_b + head) * 1.4426950408889634
    elif traits.BIAS != "none":
        bias = scores.bias.base + batch * scores.bias.stride_b + tl.cast(head, tl.int64) * scores.bias.stride_h
    cap_log2, over_cap = 0.0, 0.0
    if traits.SOFTCAP:
        cap_log2, over_cap = scores.softcap * 1.4426950408889634, scores.softmax_scale / scores.softcap
    return Factors(bias, slope, scores.softmax_scale * 1.4426950408889634, cap_log2, over_cap)


@triton.jit
def load_tile(
    tensor, batch, head, first, first_row, row, rows, dims, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Rows ``first_row`` + ``row`` [ROWS] of a sequence that begins at ``first`` and has ``rows``, [ROWS, BLOCK_D]; zeros past
    them, where memory may hold NaN."""
    at = tensor.base + batch * tensor.stride_b + tl.cast(head, tl.int64) * tensor.stride_h
    at += (first + first_row) * tensor.stride_m
    offsets = row.to(tl.int64) * tensor.stride_m if WIDE else row * tensor.stride_m
    return load_rows(at, offsets, first_row + row < rows, dims, D, BLOCK_D, True)


@triton.jit
def store_tile(
    tensor, batch, head, first, first_row, row, rows, dims, values, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Store what ``load_tile`` would load."""
    at = tensor.base + batch * tensor.stride_b + tl.cast(head, tl.int64) * tensor.stride_h
    at += (first + first_row) * tensor.stride_m
    offsets = row.to(tl.int64) * tensor.stride_m if WIDE else row * tensor.stride_m
    inside = (first_row + row < rows)[:, None]
    if D != BLOCK_D:
        inside = inside & (dims[None, :] < D)
    tl.store(at + offsets[:, None] + dims[None, :], values.to(tensor.base.dtype.element_ty), mask=inside)


@triton.jit
def load_sums(rows, place, head, first, row, dout, traits: tl.constexpr):
    """The log-sum-exp, of base 2, and delta of a head's queries ``first`` + ``row`` [BLOCK_M], whose dO is [BLOCK_M, BLOCK_DV].
    A row that sees nothing, or is past the last, has an infinite log-sum-exp: none of its probabilities is NaN, all are 0."""
    at = lse_rows(place.batch, tl.cast(head, tl.int64), place.first_q + first, rows.heads, rows.stride, rows.cu_seqlens_q)
    inside = row < place.band.seqlen_q - first
    lse = tl.load(rows.lse + at + row, mask=inside, other=float("-inf"))
    if rows.out.base is None:
        delta = tl.load(rows.delta + at + row, mask=inside, other=0.0)
    else:
        dims, queries = tl.arange(0, traits.BLOCK_DV), place.band.seqlen_q
        out = load_tile(
            rows.out, place.batch, head, place.first_q, first, row, queries, dims, traits.DV, traits.BLOCK_DV, traits.WIDE
        )  # [BLOCK_M, BLOCK_DV]  # fmt: skip
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        if rows.dlse is not None:
            delta -= tl.load(rows.dlse + at + row, mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634), delta


@triton.jit
def probabilities(a, b, query, key, lse, place, scores, factors, traits: tl.constexpr):
    """Probabilities of scores a b^T, of keys that are not seen too, and what a soft cap multiplies their gradients by."""
    band = place.band
    s = product(a, tl.trans(b), None, traits.PRECISION, traits.INTERPRET)
    slope = 1.0
    if traits.SOFTCAP:
        capped = tanh(s * factors.over_cap)
        s, slope = capped * factors.cap_log2, 1.0 - capped * capped
    else:
        s = s * factors.scale_log2
    if traits.BIAS == "alibi":
        s -= factors.slope * tl.abs(query + band.diagonal - key).to(tl.float32)
    elif traits.BIAS != "none":
        given = (query < band.seqlen_q) & (key < band.seqlen_k)
        at = query.to(tl.int64) * scores.bias.stride_m + key.to(tl.int64) * scores.bias.stride_n
        bias = tl.load(factors.bias + at, mask=given, other=0)
        if traits.BIAS == "boolean":
            s = tl.where(bias != 0, s, float("-inf"))
        else:
            s += bias_log2(bias)
    return tl.exp2(s - lse), slope


@triton.jit
def seen_only(p, query, key, band, traits: tl.constexpr):
    """Probabilities, 0 where a query does not see a key."""
    seen = in_band(
        query, key, band.seqlen_k, band.diagonal, band.left, band.right_end, band.prefix,
        traits.LEFT, traits.RIGHT, traits.PREFIX,
    )  # fmt: skip
    return tl.where(seen, p, 0.0)
