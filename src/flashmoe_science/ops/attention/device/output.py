"""O in registers: O += P V, rescaling by rows, stores of O and of the log-sum-exp.

O is an accumulator of warpgroup_mma, of 64 rows for a consumer warpgroup, in one or two parts: [BLOCK_M, width] each.

Rescaling is conditional where LAZY: Zadouri et al. 2026 (FlashAttention-4). A row's reference maximum stays where the maximum
grows by less than 2^8, and a warp none of whose references moved skips rescaling.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.softmax import as_column
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix

LAZY_ABOVE = gl.constexpr(64)  # columns of O: for fewer the rescaling costs less than the vote and the branch


@gluon.jit
def no_output(v_smem, ROWS: gl.constexpr):
    """O before the first product."""
    first: gl.constexpr = v_smem[0].shape[-1]
    o = (gl.zeros([ROWS, first], gl.float32, accumulator_layout(first)),)
    if len(v_smem) == 2:
        second: gl.constexpr = v_smem[1].shape[-1]
        return o[0], gl.zeros([ROWS, second], gl.float32, accumulator_layout(second))
    else:
        return o


@gluon.jit
def to_operand(p, o, DTYPE: gl.constexpr):
    """P in the layout of the register operand of a product with V."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, o[0].type.layout, 2))


@gluon.jit
def start_output(p, o, v_smem, stage):
    """Start O += P V in each part of O: accumulators in flight."""
    first = warpgroup_mma(p, as_matrix(v_smem[0], stage), o[0], is_async=True)
    if len(o) == 2:
        same = gl.convert_layout(p, gl.DotOperandLayout(0, o[1].type.layout, 2))  # no data move
        return first, warpgroup_mma(same, as_matrix(v_smem[1], stage), o[1], is_async=True)
    else:
        return (first,)


@gluon.jit
def wait_for_output(tokens):
    """O once every product has completed."""
    o = warpgroup_mma_wait(0, tokens)
    if len(tokens) == 1:  # no tuple then
        return (o,)
    else:
        return o


@gluon.jit
def scale_rows(o, factor):
    """Each part of O with its rows times ``factor``, [BLOCK_M]."""
    scaled = (o[0] * as_column(factor, o[0]),)
    for n in gl.static_range(1, len(o)):
        scaled = scaled + (o[n] * as_column(factor, o[n]),)  # type: ignore[assignment]
    return scaled


def _rescale_asm(count: int) -> str:
    """PTX for a thread's ``count`` products of O and factors, which a warp skips where all of its factors are 1.

    A thread holds two rows, alternating two numbers of each. The operands are the products, in O's registers, then O, then
    the factors. A factor of NaN is not 1 (``neu``).
    """
    first, second = 2 * count, 2 * count + 2
    return "\n".join(
        [
            "{",
            ".reg .pred moved;",
            f"setp.neu.f32 moved, ${first}, 0f3F800000;",
            f"setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;",
            "vote.sync.any.pred moved, moved, 0xffffffff;",
            "@!moved bra DONE;",
            *(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(count)),
            "DONE:",
            "}",
        ]
    )


def _rescale_operands(count: int) -> str:
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


_RESCALE = gl.constexpr({count: _rescale_asm(count) for count in (8, 16, 32, 64)})
_RESCALE_OPERANDS = gl.constexpr({count: _rescale_operands(count) for count in (8, 16, 32, 64)})


@gluon.jit
def _part_rescaled(o, factor):
    """A part of O with its rows times ``factor``; a warp whose factors are all 1 leaves it as it is.

    In assembly since Gluon has no vote of a warp: its reductions end in a barrier of the warpgroup, and a branch on one would
    wait for the other warps in every step. Not pure: threads that vote must be converged, so the compiler must not move it.
    """
    COUNT: gl.constexpr = min(64, o.shape[1] // 2)  # numbers of a thread in one block of assembly
    factors, same = gl.broadcast(as_column(factor, o), o)
    return gl.inline_asm_elementwise(_RESCALE[COUNT], _RESCALE_OPERANDS[COUNT], [o, factors], gl.float32, False, COUNT)


@gluon.jit
def rescale_rows(o, factor, LAZY: gl.constexpr):
    """``scale_rows``; where LAZY, a warp skips it whose factors are all 1."""
    if not LAZY:
        return scale_rows(o, factor)
    elif len(o) == 2:
        return _part_rescaled(o[0], factor), _part_rescaled(o[1], factor)
    else:
        return (_part_rescaled(o[0], factor),)


@gluon.jit
def _store_part(base, offsets, row_ok, o, first, DV: gl.constexpr):
    """Write a part of O, whose first column is ``first``, to ``base + offsets``."""
    layout: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    dims = gl.expand_dims(first + gl.arange(0, o.shape[1], layout), 0)  # [1, width]
    rows = as_column(offsets, o)
    inside = as_column(row_ok, o) & (dims < DV)
    gl.store(base + rows + dims, o.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def store_rows(base, offsets, row_ok, o, DV: gl.constexpr):
    """Write each part of O to ``base + offsets``, [BLOCK_M], of rows that are ``row_ok``."""
    _store_part(base, offsets, row_ok, o[0], 0, DV)
    if len(o) == 2:
        _store_part(base, offsets, row_ok, o[1], o[0].shape[1], DV)


@gluon.jit
def rest_lanes(WIDTH: gl.constexpr):
    """What four warps write at once for ``write_rest`` of sequences.py: pairs of a row and a head, and ``WIDTH`` columns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    return gl.arange(0, 1024 // WIDTH, gl.SliceLayout(1, layout)), gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
