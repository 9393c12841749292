"""A head whose columns are no power of two, in tiles that are: products leave the rest of a tile out, by two slices of it.

SECOND: columns of the second slice, which begins at half of a tile's; 0 where the whole tile is one. A product over columns is
two in one accumulator. Of one whose result has the columns each slice has an accumulator, hence the tuples.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.tiles import accumulator_layout


@gluon.jit
def slices(matrix, SECOND: gl.constexpr):
    """The columns of a tile, [rows, width], that products take."""
    if SECOND == 0:
        return (matrix,)
    else:
        HALF: gl.constexpr = matrix.shape[1] // 2
        return matrix.slice(0, HALF, 1), matrix.slice(HALF, SECOND, 1)


@gluon.jit
def start_over_slices(of_a, b, zeros, SECOND: gl.constexpr):
    """Start A [rows, width] B^T [width, columns], A in slices, in shared memory or registers: an accumulator in flight."""
    of_b = slices(b, SECOND)
    acc = warpgroup_mma(of_a[0], of_b[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    for n in gl.static_range(1, len(of_a)):
        acc = warpgroup_mma(of_a[n], of_b[n].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def start_over_columns(a, b, zeros, SECOND: gl.constexpr):
    """The same of two tiles in shared memory."""
    return start_over_slices(slices(a, SECOND), b, zeros, SECOND)


@gluon.jit
def _left(a, acc, IN_REGISTERS: gl.constexpr):
    if IN_REGISTERS:
        return gl.convert_layout(a, gl.DotOperandLayout(0, acc.type.layout, 2))
    else:
        return a


@gluon.jit
def start_columns(a, b, acc, SECOND: gl.constexpr, IN_REGISTERS: gl.constexpr = False):
    """Start ACC += A [rows, depth] B [depth, width], A in shared memory or registers: an accumulator a slice, in flight."""
    of_b = slices(b, SECOND)
    parts = (warpgroup_mma(_left(a, acc[0], IN_REGISTERS), of_b[0], acc[0], is_async=True),)
    for n in gl.static_range(1, len(of_b)):
        more = warpgroup_mma(_left(a, acc[n], IN_REGISTERS), of_b[n], acc[n], is_async=True)
        parts = parts + (more,)  # type: ignore[assignment]
    return parts


@gluon.jit
def wait_for_columns(pending: gl.constexpr, acc):
    """The accumulators once all but the last ``pending`` products have completed."""
    done = warpgroup_mma_wait(pending, acc)
    if len(acc) == 1:  # no tuple then
        return (done,)
    else:
        return done


@gluon.jit
def no_columns(ROWS: gl.constexpr, WIDTH: gl.constexpr, SECOND: gl.constexpr, WARPS: gl.constexpr = 4):
    """Accumulators of a tile's columns before the first product, [ROWS, width]."""
    if SECOND == 0:
        return (gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH, WARPS)),)
    else:
        first = gl.zeros([ROWS, WIDTH // 2], gl.float32, accumulator_layout(WIDTH // 2, WARPS))
        return first, gl.zeros([ROWS, SECOND], gl.float32, accumulator_layout(SECOND, WARPS))


@gluon.jit
def _kept_at(base, row, x, WIDTH: gl.constexpr, FIRST: gl.constexpr):
    """The addresses of sums between waves, of the rows from ``row`` on and the columns from FIRST on: as x, [rows, width]."""
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    return base + rows.to(gl.int64)[:, None] * WIDTH + (FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout)))[None, :]


@gluon.jit
def load_kept(base, row, acc, mask, WIDTH: gl.constexpr):
    """Sums that a wave before kept, or zeros: as ACC, of a tile of WIDTH columns."""
    found = ()
    for n in gl.static_range(len(acc)):
        found = found + (gl.load(_kept_at(base, row, acc[n], WIDTH, WIDTH // 2 * n), mask=mask, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def keep(base, row, acc, WIDTH: gl.constexpr):
    """Keep sums for the next wave."""
    for n in gl.static_range(len(acc)):
        gl.store(_kept_at(base, row, acc[n], WIDTH, WIDTH // 2 * n), acc[n])


@gluon.jit
def scaled(acc, scale):
    """Sums times a scale."""
    parts = (acc[0] * scale,)
    for n in gl.static_range(1, len(acc)):
        parts = parts + (acc[n] * scale,)  # type: ignore[assignment]
    return parts


@gluon.jit
def put(matrix, acc, SECOND: gl.constexpr):
    """Put sums into a tile in shared memory, whose other columns are left as they are."""
    places = slices(matrix, SECOND)
    for n in gl.static_range(len(acc)):
        places[n].store(acc[n].to(matrix.dtype))
