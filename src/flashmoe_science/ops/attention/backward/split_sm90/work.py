"""What programs of the first kernel work on, and what both of its forms do with it (two_tiles.py, one_tile.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.device.band import KEYS, NONE, seen_alone
from flashmoe_science.ops.attention.device.softcap import capped

SLOTS = gl.constexpr(2)  # of a tile of dS: one is copied out while the next is made


class Tensors(NamedTuple):
    """Of each tensor its TMA descriptor, None of a result that is not asked for; or its tiles in shared memory."""

    q: Any  # [STAGES, 1, 1, BLOCK_M, D]
    dout: Any  # [STAGES, 1, 1, BLOCK_M, DV]
    lse: Any  # [STAGES, BLOCK_M]
    delta: Any  # [STAGES, BLOCK_M]
    k: Any  # [TILES, 1, 1, KEYS, D], then dK
    v: Any  # [TILES, 1, 1, KEYS, DV], then dV
    ds: Any  # [TILES * SLOTS, KEYS, BLOCK_M]
    p: Any = NONE  # of one_tile.py: [BLOCK_M / 2, 128] in fp32, in the order of threads


class Stages(NamedTuple):
    full: Any
    empty: Any


class Barriers(NamedTuple):
    """``queries``: of a stage of Q, dO and the numbers of their rows; in one_tile.py of Q and the log-sum-exp, where dO and
    delta have ``douts``, and P on its way from one consumer to the other ``p``."""

    queries: Stages
    keys: Any
    douts: Any = NONE
    p: Any = NONE


class Kept(NamedTuple):
    """What holds dK and dV from a wave to the next, or None: every step is in one wave. The row of the program's first key."""

    dk: Any
    dv: Any
    row: Any


class Second(NamedTuple):
    """Columns of the second slice of tiles, and of those of dV where not whole (columns.py)."""

    qk: Any
    v: Any
    dv: Any


class Work(NamedTuple):
    """What a program works on. Steps are tiles of queries of one head after another that shares the key head, ``tiles_m``
    each; the wave has those from ``first_step`` to ``end_step``. Tiles of a head before ``low`` do not see the keys, and from
    ``whole`` on every query sees all of them. Of windows and packed sequences (band.py) the wave has whole heads, of numbers
    ``first_step`` to ``end_step``, each with dS of ``band`` tiles; ``tiles_m`` are those of a head's sums over rows."""

    batch: Any
    head: Any  # of keys, in its batch
    head_all: Any  # over all batches
    group: Any
    first_key: Any
    seqlen_k: Any
    offset: Any  # query i sees keys up to i + offset
    tiles_m: Any
    first_step: Any
    end_step: Any
    low: Any
    whole: Any
    rows: Any  # of the workspace, at which the program's first tile of dS is
    band: Any = NONE
    begin: Any = NONE  # of a window: query i sees keys from i + begin on
    sequence: Any = NONE
    tiles: Any = NONE  # the Band


@gluon.jit
def heads_of(work):
    """The first head of the group that the wave has steps of, and the end."""
    if work.band is None:
        return work.first_step // work.tiles_m, (work.end_step + work.tiles_m - 1) // work.tiles_m
    else:
        return work.first_step, work.end_step


@gluon.jit
def tiles_of(work, head):
    """The tiles of queries of a head of the group in this wave: the first, the first without a mask, the one past the last of
    these, the end."""
    if work.band is None:
        before = head * work.tiles_m
        low = gl.maximum(work.low, work.first_step - before)
        high = gl.maximum(gl.minimum(work.tiles_m, work.end_step - before), low)
        return low, gl.minimum(gl.maximum(work.whole, low), high), high, high
    else:
        return work.tiles.low, work.tiles.whole, work.tiles.beyond, work.tiles.high


@gluon.jit
def space_row_of(work, head, low, BLOCK_N: gl.constexpr):
    """The row of the workspace of the first tile of a head in this wave."""
    if work.band is None:
        return work.rows + (head * work.tiles_m + low - work.first_step) * BLOCK_N
    else:
        return work.rows + (head - work.first_step) * work.band * BLOCK_N


@gluon.jit
def resumes(work):
    """Whether a wave before this one kept sums of the program."""
    if work.band is None:
        return (work.first_step > work.low) & (work.low < work.tiles_m)
    else:
        return work.first_step > 0


@gluon.jit
def steps_of(work):
    """The end of the steps of all waves."""
    return work.tiles_m * work.group if work.band is None else work.group


@gluon.jit
def probabilities(s, stage, first_query, first_key, smem, work, scales, MASKED: gl.constexpr):
    """P of S, [KEYS, BLOCK_M], as dV takes it; and what dS takes, of a soft cap less by its slope."""
    layout: gl.constexpr = s.type.layout
    lse = smem.lse.index(stage).load(gl.SliceLayout(0, layout))  # [BLOCK_M]
    if scales.cap is None:
        p = gl.exp2(s * scales.log2 - lse[None, :])
    else:
        half = capped(s, scales.cap)  # (tanh - 1) / 2, of scores less the cap
        p = gl.exp2(half * scales.log2 - (lse - 0.5 * scales.log2)[None, :])
    if MASKED:
        key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        if work.band is None:
            last = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)) + work.offset
            p = gl.where(gl.minimum(last, work.seqlen_k - 1)[None, :] >= key[:, None], p, 0.0)
        else:
            p = seen_alone(p, key, first_query, work.sequence, work.begin)
    p16 = p.to(smem.dout.dtype)
    if scales.cap is not None:
        p *= -4.0 * half * (1.0 + half)  # 1 - tanh^2
    return p16, p
