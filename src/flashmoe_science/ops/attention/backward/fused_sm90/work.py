"""What a program of the fused backward works on, what its warps share, and what both kinds of consumers do alike."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flashmoe_science.ops.attention.backward.columns import put
from flashmoe_science.ops.attention.device.band import KEYS, NONE, origin_of, seen_alone
from flashmoe_science.ops.attention.device.tiles import as_matrix, coordinates
from flashmoe_science.ops.gluon_bridge import barrier, tma_store

SLOTS = gl.constexpr(2)  # of dQ
PRODUCT = gl.constexpr(64)  # queries of a product


class Tensors(NamedTuple):
    """Of each tensor its TMA descriptor, or its tiles in shared memory."""

    q: Any  # [STAGES, 1, 1, BLOCK_M, D]
    dout: Any  # [STAGES, 1, 1, BLOCK_M, DV]
    lse: Any  # [STAGES, BLOCK_M]
    delta: Any  # [STAGES, BLOCK_M]
    k: Any  # [2, 1, 1, KEYS, D], then dK
    v: Any  # [2, 1, 1, KEYS, DV], then dV
    ds: Any  # [slots * 2, KEYS, PRODUCT]
    dq: Any  # [SLOTS * 2, 32, 128], fp32: each of PRODUCT rows and 64 columns, in the order of ``in_turn_of_threads``
    q_low: Any = NONE  # the low half of the descriptor of Q's first stage (device/wide.py), where its products are of that form
    dout_low: Any = NONE


class Pipeline(NamedTuple):
    """The barriers of full and of empty stages."""

    full: Any
    empty: Any


class Barriers(NamedTuple):
    queries: Any  # Pipelines: of Q, dO and the numbers of their rows
    ds: Any
    dq: Any
    keys: Any


class Work(NamedTuple):
    """What a program works on: the ``nth`` tile of keys of a head, and of each query head that shares it ``count`` tiles of
    queries, from ``start`` on by ``stride``, 1 or -1; from ``whole`` on every query sees all of the keys. Of windows and packed
    sequences (band.py) keys, queries and their tiles are a sequence's, ``tiles_m`` excepted."""

    batch: Any
    head: Any  # of keys, in its batch
    first_head: Any  # of queries, over all batches
    group: Any
    nth: Any
    seqlen_k: Any
    offset: Any  # query i sees keys up to i + offset
    tiles_m: Any  # of a head's sums over rows
    tiles_n: Any
    count: Any
    start: Any
    stride: Any
    whole: Any
    beyond: Any = NONE  # of a window: before it every query sees all of the keys
    begin: Any = NONE  # of a window: query i sees keys from i + begin on
    sequence: Any = NONE
    first_row: Any = NONE  # of a sequence, among a head's sums over rows; None of what is neither


@gluon.jit
def steps_of(work):
    """Tiles of queries of all heads of the group."""
    return work.count * work.group


@gluon.jit
def place_of(work, step):
    """The head of the group and the tile of queries of a step: a head after the other, so that a tile of queries, and what is
    summed for it, is in L2 when the next tile of keys comes to it."""
    return step // work.count, work.start + step % work.count * work.stride


@gluon.jit
def first_row_of(work):
    """Where a sequence's rows begin among a head's sums over rows."""
    return 0 if work.first_row is None else work.first_row


@gluon.jit
def seen(p, tile, first_query, work, PART: gl.constexpr):
    """P, [KEYS, queries], of a consumer's keys and of a tile's queries from ``first_query`` on, with 0 where a query does not
    see a key. A branch round the mask alone: of one with a product in each arm, ptxas 12.8 left a descriptor unwritten."""
    masked = tile < work.whole
    if work.beyond is not None:
        masked |= tile >= work.beyond
    if masked:
        layout: gl.constexpr = p.type.layout
        key = work.nth * (2 * KEYS) + PART * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        if work.first_row is None:
            last = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, layout)) + work.offset
            p = gl.where(gl.minimum(last, work.seqlen_k - 1)[None, :] >= key[:, None], p, 0.0)
        else:
            p = seen_alone(p, key, first_query, work.sequence, work.begin)
    return p


@gluon.jit
def write_keys(
    dk, dv, descs, smem, work, PART: gl.constexpr, SECOND_QK: gl.constexpr = 0, SECOND_V: gl.constexpr = 0
):  # fmt: skip
    """Write dK and dV of a consumer, each in the slices of columns.py, by way of the memory of K and V."""
    barrier()
    put(as_matrix(smem.k, PART), dk, SECOND_QK)
    put(as_matrix(smem.v, PART), dv, SECOND_V)
    fence_async_shared()
    barrier()
    origin = origin_of(None if work.first_row is None else work.sequence.every_key, work.batch, work.head)
    row = work.nth * (2 * KEYS) + PART * KEYS
    tma_store(descs.k, coordinates(origin, row, 0), smem.k.index(PART))
    tma_store(descs.v, coordinates(origin, row, 0), smem.v.index(PART))
    tma.store_wait(0)
