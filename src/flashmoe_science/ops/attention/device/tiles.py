"""Tiles in shared memory and their copies by TMA: allocation, loads of a tile, the pages that a tile is on.

Tiles are powers of two wide, so a head is held in one or two parts, each with a descriptor and memory of its own: hence the
tuples. Copies are asynchronous: each completes on an mbarrier that expects its bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.descriptors import RAGGED_ROWS
from flashmoe_science.ops.gluon_bridge import tma_load

NO_PAGE = gl.constexpr(2**30)


@gluon.jit
def parts_of(desc, rest):
    """The descriptors of the parts of a tensor, of which the second may be None."""
    if rest is None:
        return (desc,)
    else:
        return desc, rest


@gluon.jit
def memory_of(descs, STAGES: gl.constexpr):
    """Shared memory for so many tiles of each part."""
    first = gl.allocate_shared_memory(descs[0].dtype, [STAGES] + descs[0].block_type.shape, descs[0].layout)
    if len(descs) == 2:
        return first, gl.allocate_shared_memory(descs[1].dtype, [STAGES] + descs[1].block_type.shape, descs[1].layout)
    else:
        return (first,)


@gluon.jit
def memory_of_keys(descs, STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Shared memory for so many tiles of each part, where a copy may bring fewer rows than a tile has."""
    shape: gl.constexpr = descs[0].block_type.shape
    first = gl.allocate_shared_memory(descs[0].dtype, [STAGES] + shape[:-2] + [BLOCK_N, shape[-1]], descs[0].layout)
    if len(descs) == 2:
        last: gl.constexpr = descs[1].block_type.shape[-1]
        return first, gl.allocate_shared_memory(descs[1].dtype, [STAGES] + shape[:-2] + [BLOCK_N, last], descs[1].layout)
    else:
        return (first,)


@gluon.jit
def as_matrix(smem, stage):
    """What a stage of shared memory holds, as a matrix."""
    return smem.index(stage).reshape([smem.shape[-3] * smem.shape[-2], smem.shape[-1]])


@gluon.jit
def coordinates(place, row, column):
    """The coordinates of a row and a column in a descriptor. ``place``: batch and head; of packed sequences the head, the
    sequence's end and its rows, of which ``row`` is one (``descriptors.ragged``)."""
    if len(place) == 2:
        return [place[0], place[1], row, column]
    else:
        return [RAGGED_ROWS, place[1], place[0], RAGGED_ROWS - place[2] + row, column]


@gluon.jit
def load_tile(descs, place, row, full, smem, stage):
    """Start the copies of all parts of a tile to a stage; ``full`` completes with the last of them."""
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes)
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    tma_load(descs[0], coordinates(place, row, 0), full, smem[0].index(stage))
    if len(descs) == 2:
        tma_load(descs[1], coordinates(place, row, descs[0].block_type.shape[-1]), full, smem[1].index(stage))


@gluon.jit
def pages_of_tile(table, count, first_row, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The pages that a tile's rows are on; NO_PAGE, of which a copy makes zeros, past the ``count`` of the sequence's pages. An
    entry of the table past the count is never read: it may be anything."""
    first = first_row // PAGE
    pages = (gl.load(table + first, mask=first < count, other=NO_PAGE),)
    for n in gl.static_range(1, BLOCK_N // PAGE):
        pages = pages + (gl.load(table + first + n, mask=first + n < count, other=NO_PAGE),)  # type: ignore[assignment]
    return pages
