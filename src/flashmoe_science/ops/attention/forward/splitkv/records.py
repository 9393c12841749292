"""Records of a launch's arguments, which the entries of both split-KV kernels pack for their device functions.

Fields in capitals are constants of a build. A tensor that is not given is None.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton.language as tl

from flashmoe_science.ops.attention.device.rotary import RotaryTables
from flashmoe_science.ops.attention.device.strided import Strided


class Operands(NamedTuple):
    """Q, K, V and O (see problem/features.py), and the log-sum-exp, ``stride_lse`` from a head to the next."""

    q: Strided
    k: Strided
    v: Strided
    out: Strided
    lse: tl.tensor
    stride_lse: tl.tensor
    heads_kv: tl.tensor


class Scores(NamedTuple):
    """What happens to scores: their scale, soft cap, biases, sinks and mask.

    left, right: keys that a row sees before and after its diagonal. prefixes: [batch], keys that every row sees. slopes: of
    ALiBi, [batch, heads]. sinks: [heads], logits. k_scale, v_scale: [batch, heads_kv], of an fp8 cache.
    """

    softmax_scale: tl.tensor
    left: tl.tensor
    right: tl.tensor
    sinks: tl.tensor
    softcap: tl.tensor | None = None
    slopes: Strided | None = None
    bias: Strided | None = None
    prefixes: tl.tensor | None = None
    k_scale: Strided | None = None
    v_scale: Strided | None = None


class New(NamedTuple):
    """Rows appended to the caches: K and V [batch, heads_kv, new, width]; ``caches``: rows, or pages, that the cache has."""

    k: Strided
    v: Strided
    caches: tl.tensor
    rotary: RotaryTables


class Split(NamedTuple):
    """A split of a sequence's keys, and where its partials go.

    number: of ``splits``. row, slot: the rows of the sequence and key head are the ``row``-th in the partials, in which the
    split has that slot. With stream-K: the tiles from ``low_tile`` to before ``high_tile`` of the sequence's ``tiles`` are the
    program's; else those are None.
    """

    number: tl.tensor
    splits: tl.tensor
    row: tl.tensor
    slot: tl.tensor
    tiles: tl.tensor | None = None
    low_tile: tl.tensor | None = None
    high_tile: tl.tensor | None = None


# What a build is specialised on.
# GROUP: query heads that share a key head. D, DV: widths of heads, padded to BLOCK_D and BLOCK_DV. BLOCK_M: packed rows of a
# program. BLOCK_N: keys of a tile. NUM_STAGES: tiles on their way. MIN_TILES: the least number of tiles in a split. PAGE: rows
# of a page, 0 without pages. LEFT, RIGHT: whether a window ends there. BEGINS: whether the first key that is seen may be past
# 0. ENDS: whether keys may end within a tile.
# Of decode_gluon, WARPS: among which a tile of keys is parted.
# Of split_triton, PREFIX: whether every row sees a prefix. TOPLEFT: where the diagonal begins. ALWAYS: scores are masked
# without a branch. SCALE_FIRST: they are scaled before the softmax. COMPENSATED: see softmax_step. WIDE: a tile may span 2^31
# elements. BLOCK_NEW: the most rows that are appended. HALF, INTERLEAVED: see load_rotated; HALF is 0 without a rotary
# embedding. MOVING: each query is rotated by its own position, else all by the first's.
Traits = namedtuple(
    "Traits",
    "GROUP D DV BLOCK_D BLOCK_DV BLOCK_M BLOCK_N NUM_STAGES MIN_TILES PAGE LEFT RIGHT BEGINS ENDS WARPS PREFIX TOPLEFT SOFTCAP "
    "BIAS ALWAYS WIDE COMPENSATED SCALE_FIRST PRECISION INTERPRET BLOCK_NEW HALF INTERLEAVED MOVING",
    defaults=(None, None, None, None, None, None, None, None, None, None, None, None, None, None),
)
