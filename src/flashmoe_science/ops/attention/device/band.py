"""Of windows and of packed sequences: which queries see a program's keys, which keys a program's queries see, where dS is.

Rows of all packed sequences are in tiles, of which each sequence begins one of its own; the last rows, which no sequence owns,
do too. So a grid over all tiles needs the total of rows alone. A head's dS of a tile of keys is a band of the queries of its
sequence, from the first tile of QUERIES that sees any of the keys on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.device.mask import columns_before
from flashmoe_science.ops.attention.device.tiles import Origin, RaggedOrigin
from flashmoe_science.ops.gluon_bridge import as_gluon

KEYS, QUERIES = gl.constexpr(64), gl.constexpr(128)  # of a consumer and its tiles of dS; of a tile of sums over rows
NONE = gl.constexpr(None)  # as a default of what kernels are given


class Packed(NamedTuple):
    """Packed sequences: where they begin, and how many keys of each are in use or None; how many they are, and all rows."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    batches: Any
    total_q: Any
    total_k: Any


class Rows(NamedTuple):
    """Rows of one packed sequence: how many, and where they end among all."""

    count: Any
    end: Any


class Sequence(NamedTuple):
    """A sequence of ``tiles`` tiles of QUERIES queries, of which query i sees keys up to i + ``offset``, and before
    ``seqlen_k``; where a window begins is not here, as it may be None. Of packed ones how many more keys in use there are than
    queries; the rows, of keys those in use and all; the first row of what is summed over rows; the first tile of keys. The rows
    that no sequence owns have no query and no key in use."""

    tiles: Any
    seqlen_k: Any
    offset: Any
    diagonal: Any = NONE
    queries: Any = NONE
    keys: Any = NONE
    every_key: Any = NONE
    first_row: Any = NONE
    first_tile: Any = NONE


class Band(NamedTuple):
    """Tiles of queries from ``low`` to before ``high`` see a program's keys; from ``whole`` to before ``beyond`` every query
    sees all of them."""

    low: Any
    whole: Any
    beyond: Any
    high: Any


@triton.jit
def sequence_of_tile(cu_seqlens, batches, tile, ROWS: tl.constexpr):
    """The number of the sequence that a tile of ROWS rows is of: that of number n begins at tile cu_seqlens[n] // ROWS + n.
    ``batches``: none owns its rows."""
    low = tile * 0
    high = batches + 1
    while high - low > 1:
        middle = (low + high) // 2
        begun = tl.load(cu_seqlens + middle) // ROWS + middle <= tile
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


number_of_sequence = as_gluon(sequence_of_tile)


@triton.jit
def packed_rows_at(places, tile, cu_seqlens, batches, end_unowned, ROWS: tl.constexpr):
    """The rows among all of those at ``places``, which are in tile ``tile`` of ROWS, and which of them their sequence has, or
    none has: those before ``end_unowned``."""
    number = sequence_of_tile(cu_seqlens, batches, tile, ROWS)
    begin = tl.load(cu_seqlens + number)
    end = tl.load(cu_seqlens + number + 1, mask=number < batches, other=end_unowned)
    rows = places + (begin - (begin // ROWS + number) * ROWS)
    return rows, rows < end


@gluon.jit
def _range(cu_seqlens, number, batches, total):
    """The first row of a sequence, and the one past its last."""
    return gl.load(cu_seqlens + number), gl.load(cu_seqlens + number + 1, mask=number < batches, other=total)


@gluon.jit
def sequence_at(packed, number, offset, BLOCK_N: gl.constexpr):
    """The Sequence of a number. ``offset``: from the diagonal on, which ends at the last key in use."""
    first_q, end_q = _range(packed.cu_seqlens_q, number, packed.batches, packed.total_q)
    first_k, end_k = _range(packed.cu_seqlens_k, number, packed.batches, packed.total_k)
    owned = number < packed.batches
    queries, keys = gl.where(owned, end_q - first_q, 0), gl.where(owned, end_k - first_k, 0)
    if packed.seqused_k is not None:
        keys = gl.maximum(gl.minimum(gl.load(packed.seqused_k + number, mask=owned, other=0), keys), 0)
    diagonal = keys - queries
    return Sequence(
        (queries + QUERIES - 1) // QUERIES, keys, offset + diagonal, diagonal,
        Rows(end_q - first_q, end_q), Rows(keys, first_k + keys), Rows(end_k - first_k, end_k),
        (first_q // QUERIES + number) * QUERIES, first_k // BLOCK_N + number,
    )  # fmt: skip


@gluon.jit
def origin_of(rows, batch, head):
    """Where a head's rows begin; ``rows``: of a packed sequence, or None."""
    if rows is None:
        return Origin((batch, head))
    else:
        return RaggedOrigin(head, rows.end, rows.count)


@gluon.jit
def first_in_band(first_key, offset, UNIT: gl.constexpr):
    """The first tile of UNIT queries that sees a tile of keys: the first whose dS is in the band."""
    return gl.maximum(first_key - offset, 0) // UNIT


@gluon.jit
def band_of_keys(sequence, begin, first_key, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNIT: gl.constexpr):
    """The Band of a tile of keys. ``low`` and ``high`` begin a UNIT of queries: where dS is written, as many as a program of dQ
    reads at a time."""
    TILES: gl.constexpr = QUERIES // BLOCK_M
    UNITS: gl.constexpr = UNIT // BLOCK_M
    low = gl.minimum(first_in_band(first_key, sequence.offset, UNIT), sequence.tiles * (QUERIES // UNIT)) * UNITS
    whole = (gl.maximum(first_key + BLOCK_N - 1 - sequence.offset, 0) + BLOCK_M - 1) // BLOCK_M
    high = sequence.tiles * TILES
    whole = gl.where(first_key + BLOCK_N > sequence.seqlen_k, high, whole)
    beyond = high
    if begin is not None:
        end = (gl.maximum(first_key + BLOCK_N - begin, 0) + UNIT - 1) // UNIT
        high = gl.minimum(high, end * UNITS)
        beyond = gl.maximum(first_key + 1 - begin, 0) // BLOCK_M
    high = gl.where(first_key < sequence.seqlen_k, gl.maximum(high, low), low)
    whole = gl.minimum(gl.maximum(whole, low), high)
    return Band(low, whole, gl.minimum(gl.maximum(beyond, whole), high), high)


@gluon.jit
def first_that_sees(key, first_query, sequence, BLOCK_M: gl.constexpr):
    """Of BLOCK_M queries from ``first_query`` on, the first that a window's left does not hide a key from."""
    return gl.where(key < sequence.seqlen_k, key - sequence.offset - first_query, BLOCK_M)


@gluon.jit
def seen_alone(p, key, first_query, sequence, begin):
    """P, [keys, queries], with 0 where a query, of those from ``first_query`` on, does not see a key."""
    seen = columns_before(p, first_that_sees(key, first_query, sequence, p.shape[1])[:, None]) == 0
    if begin is not None:
        seen &= columns_before(p, (key - begin - first_query + 1)[:, None])
    return gl.where(seen, p, 0.0)


@gluon.jit
def keys_of_queries(sequence, begin, first_query):
    """The keys that any of QUERIES queries from ``first_query`` on sees: the first, a multiple of KEYS, and the end."""
    seen = gl.minimum(sequence.seqlen_k, gl.maximum(first_query + QUERIES + sequence.offset, 0))
    seen = gl.where(first_query < sequence.tiles * QUERIES, seen, 0)
    if begin is None:
        return seen * 0, seen
    else:
        return gl.maximum(first_query + begin, 0) // KEYS * KEYS, seen


@gluon.jit
def row_of_space(rows, pitch, key, offset, TILES: gl.constexpr, BLOCK_N: gl.constexpr):
    """The row of the workspace where dS of a key begins, of the queries of a program of dQ. ``rows``: where it would be of the
    sequence's first tile of keys, were its band to begin at the first query; ``pitch``: from a tile of keys to the next."""
    nth = key // BLOCK_N
    return rows + nth * pitch + key % BLOCK_N - first_in_band(nth * BLOCK_N, offset, QUERIES) * (TILES * BLOCK_N)
