"""Device code of kernels whose keys are parted among the warps: copies of a tile's rows, and the sum of the warps' outputs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def swizzled(width, order):
    """Shared memory of rows of ``width`` 16-bit numbers: 16 bytes of each of eight rows are in banks of their own."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // width), min(8, width // 8), order)


@gluon.constexpr_function
def copied(warps, width):
    """How threads copy a tile [warps, keys of a warp, width] of 16-bit numbers: each 16 bytes of its own warp's rows."""
    return gl.BlockedLayout([1, 1, 8], [1, 32 // (width // 8), width // 8], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def copied_keys(WARPS: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr):
    """Numbers [warps, keys of a warp] of a tile's keys, in the layout of copies."""
    of_keys: gl.constexpr = gl.SliceLayout(2, copied(WARPS, WIDTH))
    of_warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, of_keys)), 1)
    return of_warp * OWN + gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(0, of_keys)), 0)


@gluon.jit
def copied_columns(WARPS: gl.constexpr, WIDTH: gl.constexpr):
    """Numbers [1, 1, width] of a tile's columns, in the layout of copies."""
    of_columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, copied(WARPS, WIDTH)))
    return gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, of_columns), 0), 1)


@gluon.jit
def sum_of_warps(acc, row_max, row_sum):
    """Combine the warps' maxima (of the exponent to base 2) and sums [warps, rows] and unscaled outputs [warps, rows, width] to
    those of rows [rows] and [rows, width]: in the order of the warps, through shared memory, so that a thread has a row's part
    of all of them."""
    WARPS: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = acc.shape[2]
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_layout: gl.constexpr = gl.SwizzledSharedLayout(4, max(1, 32 // WIDTH), min(8, WIDTH // 4), [2, 1, 0])
    o_smem = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_M, WIDTH], o_layout, acc)
    max_smem = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_M], rows_layout, row_max)
    sum_smem = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_M], rows_layout, row_sum)
    SPAN: gl.constexpr = min(8, BLOCK_M * WIDTH // (32 * WARPS))
    merged: gl.constexpr = gl.BlockedLayout([WARPS, 1, SPAN], [1, 32 * SPAN // WIDTH, WIDTH // SPAN], [1, WARPS, 1], [2, 1, 0])
    maxima = max_smem.load(gl.SliceLayout(2, merged))  # [warps, rows]
    row_max = gl.max(maxima, 0)  # [rows]
    # A row that sees no key has a maximum of -inf; subtracting 0 instead keeps exp2(-inf) = 0 rather than NaN.
    shrink = gl.exp2(maxima - gl.expand_dims(gl.where(row_max == float("-inf"), 0.0, row_max), 0))
    row_sum = gl.sum(sum_smem.load(gl.SliceLayout(2, merged)) * shrink, 0)
    return row_max, row_sum, gl.sum(o_smem.load(merged) * gl.expand_dims(shrink, 2), 0)
