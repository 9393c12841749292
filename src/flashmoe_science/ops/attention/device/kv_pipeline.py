"""A consumer's side of the pipelines of K and V: S = Q K^T of a tile of keys during O += P V of the tile before it.

The overlap of a softmax with products within a warpgroup: Shah et al. 2024 (FlashAttention-3, section 3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.output import start_output
from flashmoe_science.ops.attention.device.tiles import start_scores
from flashmoe_science.ops.attention.device.wide import start_wide_output
from flashmoe_science.ops.pipeline_gluon import advance, first_stage


class Descriptors(NamedTuple):
    """TMA descriptors of Q, K and V, of each a tuple of parts."""

    q: Any
    k: Any
    v: Any


class Buffers(NamedTuple):
    """Tiles in shared memory, of each tensor a tuple of parts, [stages, ..., rows, width]."""

    q: Any
    k: Any
    v: Any
    o: Any = None


class Barriers(NamedTuple):
    """Barriers of stages that are full, and of those that are empty, [stages, 1]."""

    q_full: Any
    q_empty: Any  # None where a program has one tile of Q
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class KVState(NamedTuple):
    """The PipelineStates of K and of V."""

    k: Any
    v: Any


class RowState(NamedTuple):
    """What a consumer carries from tile to tile of keys."""

    p: Any  # of the tile before, as a product's operand, [BLOCK_M, BLOCK_N]
    o: Any  # a tuple of parts, [BLOCK_M, width]
    max: Any  # [BLOCK_M]
    sum: Any  # [BLOCK_M, 4], of the columns that each of a row's threads holds
    lost: Any  # what rounding took from the sum, [BLOCK_M, 4]


@gluon.jit
def first_kv():
    """The KVState at which a producer and its consumers begin."""
    return KVState(first_stage(), first_stage())


@gluon.jit
def release_k(barriers, kv):
    """Release K's stage to the producer. Returns the KVState after it."""
    mbarrier.arrive(barriers.k_empty.index(kv.k.stage))
    return KVState(advance(kv.k, barriers.k_full.shape[0]), kv.v)


@gluon.jit
def release_v(barriers, kv):
    """Release V's stage to the producer. Returns the KVState after it."""
    mbarrier.arrive(barriers.v_empty.index(kv.v.stage))
    return KVState(kv.k, advance(kv.v, barriers.v_full.shape[0]))


@gluon.jit
def skip_tiles(tiles, barriers, kv):
    """Consume and release ``tiles`` stages of K and of V without computing. Returns the KVState after them."""
    for _ in range(tiles):
        mbarrier.wait(barriers.k_full.index(kv.k.stage), kv.k.phase)
        kv = release_k(barriers, kv)
        mbarrier.wait(barriers.v_full.index(kv.v.stage), kv.v.phase)
        kv = release_v(barriers, kv)
    return kv


@gluon.jit
def start_values(p, o, buffers, barriers, kv, v_low):
    """Start O += P V of V's stage. ``v_low``: the low half of the descriptor of V's first stage in the wide form (wide.py)."""
    if v_low is None:
        return start_output(p, o, buffers.v, kv.v.stage)
    else:
        v_smem = buffers.v[0]
        STAGE: gl.constexpr = v_smem.shape[0] // barriers.v_full.shape[0] * v_smem.shape[-2] * v_smem.shape[-1] * 2  # bytes
        return start_wide_output(p, o, v_low + kv.v.stage * (STAGE >> 4), v_smem.dtype)


@gluon.jit
def start_products(q_stage, buffers, barriers, p, o, kv, v_low):
    """Start S = Q K^T of a tile of keys and O += P V of the tile before it, and wait for S alone. Returns S [BLOCK_M, BLOCK_N],
    O in flight, and the KVState after K's stage, which is released."""
    mbarrier.wait(barriers.k_full.index(kv.k.stage), kv.k.phase)
    s_token = start_scores(buffers.q, q_stage, buffers.k, kv.k.stage)
    mbarrier.wait(barriers.v_full.index(kv.v.stage), kv.v.phase)
    o_tokens = start_values(p, o, buffers, barriers, kv, v_low)
    s = warpgroup_mma_wait(len(o) if v_low is None else 1, [s_token])
    return s, o_tokens, release_k(barriers, kv)
