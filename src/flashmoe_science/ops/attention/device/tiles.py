"""Tiles in shared memory, their copies by TMA, and S = Q K^T of two of them.

Tiles are powers of two wide, so a head is held in one or two parts, each with a descriptor and memory of its own: hence the
tuples. Memory is [stages, ..., rows, width]. A copy completes on an mbarrier that expects its bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from flashmoe_science.ops.descriptors import RAGGED_ROWS
from flashmoe_science.ops.gluon_bridge import tma_load

NO_PAGE = gl.constexpr(2**30)  # of which a copy makes zeros


@gluon.constexpr_function
def accumulator_layout(columns: int, warps: int = 4) -> Any:
    """The layout of an accumulator of warpgroup_mma, of 16 rows for each of ``warps``."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def in_turn_of_threads(x):
    """What a warpgroup's product gives, [64, columns], as [columns / 2, 128]: of every 8 columns the 4 numbers of one thread
    after those of another. So they are stored 16 bytes at once and to all banks; in rows, two threads' would meet in one bank.
    The 4 are two columns of a row and of the eighth after it (PTX ISA, "wgmma.mma_async.m64nNk16")."""
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2])  # warp, eight rows, row, eight columns, pair of columns, column
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([COLUMNS // 2, 128])


class Origin(NamedTuple):
    """Where rows begin in a descriptor: the coordinates before the row's, two or three."""

    outer: Any


class RaggedOrigin(NamedTuple):
    """Where packed rows begin, ``rows`` before ``end``, in a descriptor whose rows end where a copy says (``ragged``)."""

    head: Any
    end: Any
    rows: Any


@gluon.jit
def coordinates(origin, row, column):
    """The coordinates of a row and a column of an Origin or a RaggedOrigin."""
    if len(origin) == 3:
        return [RAGGED_ROWS, origin.end, origin.head, RAGGED_ROWS - origin.rows + row, column]
    elif len(origin.outer) == 3:
        return [origin.outer[0], origin.outer[1], origin.outer[2], row, column]
    else:
        return [origin.outer[0], origin.outer[1], row, column]


@gluon.jit
def parts_of(desc, rest):
    """The descriptors of the parts of a tensor, of which the second may be None."""
    if rest is None:
        return (desc,)
    else:
        return desc, rest


@gluon.jit
def allocate_tiles(descs, STAGES: gl.constexpr, ROWS: gl.constexpr = None):
    """Shared memory for ``STAGES`` tiles of each part; of ``ROWS`` rows where a copy brings fewer than a tile has."""
    shape: gl.constexpr = descs[0].block_type.shape
    rows: gl.constexpr = shape[-2] if ROWS is None else ROWS
    first = gl.allocate_shared_memory(descs[0].dtype, [STAGES] + shape[:-2] + [rows, shape[-1]], descs[0].layout)
    if len(descs) == 2:
        last: gl.constexpr = descs[1].block_type.shape[-1]
        return first, gl.allocate_shared_memory(descs[1].dtype, [STAGES] + shape[:-2] + [rows, last], descs[1].layout)
    else:
        return (first,)


@gluon.jit
def as_matrix(smem, stage):
    """A stage of shared memory as a matrix, [rows, width]."""
    return smem.index(stage).reshape([smem.shape[-3] * smem.shape[-2], smem.shape[-1]])


@gluon.jit
def unfolded(index, step, FEW_REGISTERS: gl.constexpr):
    """``index``, with FEW_REGISTERS in a form that the assembler does not take for a constant (``step`` is below 2^30). So it
    makes the address in shared memory anew in each step, and keeps none in registers that it would have to spill
    (docs/notes/backward.md)."""
    if FEW_REGISTERS:
        return index + (step >> 30)
    else:
        return index


@gluon.jit
def load_tile(descs, origin, row, full, smem, stage, CHUNKS: gl.constexpr = 1):
    """Start the copies of a tile's parts to a stage; ``full`` completes with the last of them. Of one part it may be ``CHUNKS``
    tiles side by side, each in memory of its own."""
    shape: gl.constexpr = descs[0].block_type.shape
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes * CHUNKS)
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    for n in gl.static_range(CHUNKS):
        tma_load(descs[0], coordinates(origin, row, n * shape[-1]), full, smem[0].index(stage * CHUNKS + n))
    if len(descs) == 2:
        tma_load(descs[1], coordinates(origin, row, shape[-1]), full, smem[1].index(stage))


@gluon.jit
def pages_of_tile(table, count, first_row, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The pages that a tile's rows are on, by its sequence's row of the page table; NO_PAGE past the ``count`` of its pages. An
    entry of the table past the count is never read: it may be anything."""
    first = first_row // PAGE
    pages = (gl.load(table + first, mask=first < count, other=NO_PAGE),)
    for n in gl.static_range(1, BLOCK_N // PAGE):
        pages = pages + (gl.load(table + first + n, mask=first + n < count, other=NO_PAGE),)  # type: ignore[assignment]
    return pages


@gluon.jit
def row_on_page(row, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The row of its page at which a tile of keys begins, at row ``row`` of its sequence."""
    return row % PAGE if BLOCK_N < PAGE else 0


@gluon.jit
def load_pages(
    descs, head, pages, pitch, keys, first_row, full, smem, stage, PAGE: gl.constexpr, CHUNKS: gl.constexpr = 1
):  # fmt: skip
    """``load_tile`` of a tile whose rows are on ``pages``, by a copy for each of them.

    Without ``pitch`` pages are a dimension of the descriptor, [pages, heads, rows, width], and ``first_row`` is the tile's row
    on the first of them. With it a page begins ``pitch`` rows after the one before, in a descriptor whose rows end where a copy
    says (``ragged``): what follows the last of ``keys`` on its page is left out; ``first_row`` is the tile's of the sequence.
    """
    shape: gl.constexpr = descs[0].block_type.shape
    ROWS: gl.constexpr = shape[-2]  # of a copy
    DIM: gl.constexpr = len(shape) - 2
    BLOCK_N: gl.constexpr = smem[0].shape[-2]
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes * (BLOCK_N // ROWS * CHUNKS))
    else:
        mbarrier.expect(full, (descs[0].block_type.nbytes + descs[1].block_type.nbytes) * (BLOCK_N // ROWS))
    row = first_row
    if pitch is not None:
        row = row_on_page(first_row, BLOCK_N, PAGE)
    for n in gl.static_range(BLOCK_N // ROWS):
        if pitch is None:
            origin = Origin((pages[n], head))
        else:
            valid = gl.minimum(gl.maximum(keys - first_row + row - n * ROWS, 0), PAGE)
            end = gl.where(valid > 0, pages[n] * pitch + valid, 0)
            origin = RaggedOrigin(head, end, valid)  # type: ignore[assignment]
        for chunk in gl.static_range(CHUNKS):
            rows = smem[0].index(stage * CHUNKS + chunk).slice(n * ROWS, ROWS, DIM)
            tma_load(descs[0], coordinates(origin, row, chunk * shape[-1]), full, rows)
        if len(descs) == 2:
            rows = smem[1].index(stage).slice(n * ROWS, ROWS, DIM)
            tma_load(descs[1], coordinates(origin, row, shape[-1]), full, rows)


@gluon.jit
def add_scores(s, q_smem, q_stage, k_smem, k_stage, START: gl.constexpr):
    """Start S += Q K^T, or where START S = Q K^T, a product for each part of a head: an accumulator in flight."""
    q, k = as_matrix(q_smem[0], q_stage), as_matrix(k_smem[0], k_stage)  # [BLOCK_M, width], [BLOCK_N, width]
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=not START, is_async=True)
    if len(k_smem) == 2:
        q, k = as_matrix(q_smem[1], q_stage), as_matrix(k_smem[1], k_stage)
        s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def no_scores(q_smem, k_smem):
    """S before the first product, [BLOCK_M, BLOCK_N]."""
    ROWS: gl.constexpr = q_smem[0].shape[-3] * q_smem[0].shape[-2]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    return gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))


@gluon.jit
def start_scores(q_smem, q_stage, k_smem, k_stage):
    """Start S = Q K^T, [BLOCK_M, BLOCK_N]: an accumulator in flight."""
    return add_scores(no_scores(q_smem, k_smem), q_smem, q_stage, k_smem, k_stage, True)
