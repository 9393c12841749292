"""What the attention kernels for Hopper share in Gluon: tiles in rings of shared memory, softmax, O, its rescaling and stores.

Tiles are powers of two wide, so a head is held in one or two parts, each with a descriptor and memory of its own: hence the
tuples. Matrices of scores and of O are accumulators of warpgroup_mma, of 64 rows for a consumer warpgroup.

Rescaling of O is conditional where LAZY: Zadouri et al. 2026 (FlashAttention-4). A row's reference maximum stays where the
maximum grows by less than 2^8, and a warp none of whose references moved skips rescaling.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device import lse_triton
from flashmoe_science.ops.attention.forward import tiled_triton as fwd_triton
from flashmoe_science.ops.descriptors import RAGGED_ROWS
from flashmoe_science.ops.gluon_bridge import as_gluon, tma_load

GROWTH = gl.constexpr(8.0)  # of a row's maximum, as a power of two, at which O is rescaled; where smaller it keeps its scale
NO_PAGE = gl.constexpr(2**30)
LAZY_ABOVE = gl.constexpr(64)  # columns of O: for fewer the rescaling costs less than the vote and the branch
log2_of_sum = as_gluon(fwd_triton.log2_of_sum)
with_sink = as_gluon(lse_triton.with_sink)


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
def pages_of_tile(table, count, first_row, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """The pages that a tile's rows are on; NO_PAGE, of which a copy makes zeros, past the ``count`` of the sequence's pages. An
    entry of the table past the count is never read: it may be anything."""
    first = first_row // PAGE
    pages = (gl.load(table + first, mask=first < count, other=NO_PAGE),)
    for n in gl.static_range(1, BLOCK_N // PAGE):
        pages = pages + (gl.load(table + first + n, mask=first + n < count, other=NO_PAGE),)  # type: ignore[assignment]
    return pages


@gluon.jit
def columns_before(s, limit):
    """Which columns of scores are before ``limit``, one number or [rows, 1].

    Of a column's number, the part that differs between a thread's registers is a constant to the compiler. The part that
    differs between threads is taken from the limit: two subtractions a thread, and for each score a comparison with a constant.
    With numbers of columns in registers the assembler also orders the loop over keys to save registers, which took 9%.
    """
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    return (column & ~6) < limit - (column & 6)  # a row's four threads hold two columns of eight each


@gluon.jit
def mask_keys(s, first_key, first_row, span, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where a key is not among those that its row sees.

    Args:
        span: queries and keys of the sequence; from a row to the last key that it sees when causal; how many keys every row
            sees then, or None; how many a row sees before its own place, the bottom right aligned, or None for all.
        QUERIES: after so many rows come the same queries of the next head.
    """
    seqlen_q, seqlen_k, to_last, prefix, left = span
    limit = seqlen_k - first_key
    if CAUSAL or left is not None:
        row = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        if s.shape[0] > QUERIES:
            row = row % QUERIES
        row = first_row + row
    if CAUSAL:
        own = row + to_last + 1 - first_key
        if prefix is not None:
            own = gl.maximum(own, prefix - first_key)
        limit = gl.expand_dims(gl.minimum(own, limit), 1)
    seen = columns_before(s, limit)
    if left is not None:
        seen &= columns_before(s, gl.expand_dims(row + seqlen_k - seqlen_q - left - first_key, 1)) == 0
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def capped(s, scale):
    """(tanh(x) - 1) / 2 of the scores over the cap: -1 / (1 + e^(2 x)), with ``scale`` from a product Q K^T to log2 of e^(2 x).

    The softmax takes it times twice the cap: scores less the cap, which changes their maximum alone. Two instructions of the
    special-function unit and two others. A score is off by 2^-21 of the cap at the most, however small it is; what a softmax
    makes of scores follows from their differences.
    """
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [-1.0 - gl.exp2(s * scale)], gl.float32, True, 1)


@gluon.jit
def _row_maxima(s, row_max, PAIRS_LAST: gl.constexpr):
    """The largest score of each row, laid out as ``row_max``."""
    # A thread's pairs and columns in turn, then the four threads of a row: a third of the dependent steps of a plain reduction.
    scores = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    if PAIRS_LAST:
        own = gl.max(gl.max(scores, 1), 2)
    else:
        own = gl.max(gl.max(scores, 3), 1)
    return gl.convert_layout(gl.max(own, 1), row_max.type.layout)


@gluon.jit
def softmax_step(s, row_max, scale_log2, MASKED: gl.constexpr, LAZY: gl.constexpr, PAIRS_LAST: gl.constexpr = False):
    """One online-softmax step: probabilities, the new maximum, and the factor by which older sums and output must shrink.
    PAIRS_LAST: the order in which maxima are found, for the assembler's sake (docs/notes/fwd-gluon-sm90.md); results are equal.

    Where LAZY, the maximum is one within a factor of 2^GROWTH: the old one stays until a score exceeds it by more, and the
    factor is exactly 1. Probabilities are at the most 2^GROWTH then, which the 16-bit types and fp32 sums hold.

    Maxima are kept scaled. Scaled anew in each step, the old one would meet the new one in a fused multiply-add that does not
    round it: the factor would miss 1 by the rounding error where the maximum stays, and in every step by the same.
    """
    tile_max = _row_maxima(s, row_max, PAIRS_LAST)
    if LAZY:  # NaN is not above: the old maximum stays where both are -inf or the tile's is NaN, as with gl.maximum
        tile_max *= scale_log2
        new_max = gl.where(tile_max - row_max > GROWTH, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, tile_max * scale_log2)
    shift = new_max
    if MASKED:  # a row may have seen no key yet: subtract 0 then, since -inf - -inf is NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    return p, new_max, gl.exp2(row_max - shift)


# tanh(x) / 2 = y P(y^2) with y = 2 x, for |y| below the first number: P's coefficients, the lowest power first, fitted to the
# least largest error, which for tanh is 2^-21. P rises for all y.
_HALF_TANH = (
    (0.69, (0.24999774992465973, -0.020794933661818504, 0.0019182744435966015)),
    (1.6, (0.2499987781047821, -0.020823391154408455, 0.002060346771031618, -1.8852073117159307e-04, 1.1195946171937976e-05)),
)
LEAST_CAP = gl.constexpr(30.0)  # from which on scores far below a row's maximum count for nothing, whatever P makes of them


def _bits(number: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


def _capped_asm(count: int) -> str:
    """PTX for what ``capped`` gives of a thread's ``count`` scores, in place.

    A thread holds two rows, in turn two scores of each. The operands are the scores, then the rows' largest ones (operand
    2 * count of the one row and two later of the other), then ``capped``'s scale. A polynomial for |y| < Y serves a warp whose
    rows all have theirs in (-Y / 2, Y); NaN is not.
    """
    tops, scale = (2 * count, 2 * count + 2), f"${3 * count}"
    most = max(len(powers) for _, powers in _HALF_TANH)
    lines = ["{", ".reg .pred near;", f".reg .f32 over, square, power, top, p, {', '.join(f'c{n}' for n in range(most))};"]
    lines += [f"mul.f32 over, {scale}, {_bits(0.6931471805599453)};", "mul.f32 square, over, over;"]
    for tier, (reach, powers) in enumerate(_HALF_TANH):
        lines += [f"setp.eq.f32 near, {_bits(0.0)}, {_bits(0.0)};"]
        for top in tops:
            lines += [f"mul.f32 top, ${top}, over;", f"setp.lt.and.f32 near, top, {_bits(reach)}, near;"]
            lines += [f"setp.gt.and.f32 near, top, {_bits(-reach / 2)}, near;"]
        lines += ["vote.sync.all.pred near, near, 0xffffffff;", f"@!near bra FAR{tier};", "mov.f32 power, over;"]
        for n, one in enumerate(powers):
            lines += [f"mul.f32 c{n}, power, {_bits(one)};", "mul.f32 power, power, square;"]
        for score in range(count):
            lines += [f"mul.f32 top, ${score}, ${score};", f"mov.f32 p, c{len(powers) - 1};"]
            lines += [f"fma.rn.f32 p, p, top, c{n};" for n in reversed(range(len(powers) - 1))]
            lines += [f"fma.rn.f32 ${score}, p, ${score}, {_bits(-0.5)};"]
        lines += ["bra DONE;", f"FAR{tier}:"]
    for score in range(count):
        lines += [f"mul.f32 ${score}, ${score}, {scale};", f"ex2.approx.ftz.f32 ${score}, ${score};"]
        lines += [f"sub.f32 ${score}, {_bits(-1.0)}, ${score};", f"rcp.approx.ftz.f32 ${score}, ${score};"]
    return "\n".join([*lines, "DONE:", "}"])


_CAPPED = gl.constexpr(_capped_asm(64))
_CAPPED_OPERANDS = gl.constexpr(",".join(["=&f"] * 64 + [str(i) for i in range(64)] + ["f"] * 128))


@gluon.jit
def capped_softmax_step(s, row_max, scales, LAZY: gl.constexpr):
    """What ``softmax_step`` makes of ``capped`` scores, of which none is masked and each thread holds 64.

    A cap lets the largest score of a row stay the largest. Where those of a warp are small beside the cap, the rest are not far
    above, and a polynomial caps them: four or six multiply-adds a score, where ``capped`` takes two instructions of the
    special-function unit, which has eight cycles for each. Of scores far below, the polynomial makes too little, but less the
    lower they are: from LEAST_CAP on what that changes a probability by is under 2^-20 of the largest.
    """
    tile_max = _row_maxima(s, row_max, False)
    top = capped(tile_max, scales[1]) * scales[0]
    new_max = gl.where(top - row_max > GROWTH, top, row_max) if LAZY else gl.maximum(row_max, top)
    judged = gl.where(scales[0] < 2.0 * LEAST_CAP * 1.4426950408889634, float("inf"), tile_max)
    tops, same = gl.broadcast(gl.expand_dims(gl.convert_layout(judged, gl.SliceLayout(1, s.type.layout)), 1), s)
    over, same = gl.broadcast(gl.full([1, 1], scales[1], gl.float32, s.type.layout), s)
    s = gl.inline_asm_elementwise(_CAPPED, _CAPPED_OPERANDS, [s, tops, over], gl.float32, False, 64)
    return gl.exp2(s * scales[0] - gl.expand_dims(new_max, 1)), new_max, gl.exp2(row_max - new_max)


@gluon.jit
def own_sums(p):
    """Sums over the columns that each thread holds; the four threads that share a row meet only once, after the last tile."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def as_matrix(smem, stage):
    """What a stage of shared memory holds, as a matrix."""
    return smem.index(stage).reshape([smem.shape[-3] * smem.shape[-2], smem.shape[-1]])


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
    """O as it is once every product has completed."""
    o = warpgroup_mma_wait(0, tokens)
    if len(tokens) == 1:  # it stands alone then
        return (o,)
    else:
        return o


@gluon.jit
def scale_rows(o, factor):
    """Each part or piece of O with its rows times ``factor``."""
    scaled = (o[0] * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o[0].type.layout)), 1),)
    for n in gl.static_range(1, len(o)):
        rows = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o[n].type.layout)), 1)
        scaled = scaled + (o[n] * rows,)  # type: ignore[assignment]
    return scaled


def _rescale_asm(count: int) -> str:
    """PTX for a thread's ``count`` products of O and factors, which a warp skips where all of its factors are 1.

    A thread holds two rows, in turn two numbers of each. The operands are the products, which stand where O stood, then O,
    then the factors. A factor of NaN is not 1 (``neu``).
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
    wait for the other warps in every step. Not pure: threads that vote must meet, so the compiler must not move it.
    """
    COUNT: gl.constexpr = min(64, o.shape[1] // 2)  # numbers of a thread in one piece of assembly
    factors, same = gl.broadcast(gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout)), 1), o)
    return gl.inline_asm_elementwise(_RESCALE[COUNT], _RESCALE_OPERANDS[COUNT], [o, factors], gl.float32, False, COUNT)


@gluon.jit
def rescale_rows(o, factor, LAZY: gl.constexpr):
    """What ``scale_rows`` gives; where LAZY, a warp skips it whose factors are all 1."""
    if not LAZY:
        return scale_rows(o, factor)
    elif len(o) == 2:
        return _part_rescaled(o[0], factor), _part_rescaled(o[1], factor)
    else:
        return (_part_rescaled(o[0], factor),)


@gluon.jit
def no_output(v_smem, ROWS: gl.constexpr):
    """O before the first product."""
    first: gl.constexpr = v_smem[0].shape[-1]
    o = (gl.zeros([ROWS, first], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, first, 16])),)
    if len(v_smem) == 2:
        second: gl.constexpr = v_smem[1].shape[-1]
        return o[0], gl.zeros([ROWS, second], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, second, 16]))
    else:
        return o


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
def _store_part(base, offsets, row_ok, o, first, DV: gl.constexpr):
    """Write a part of O, whose first column is ``first``, to ``base + offsets``."""
    layout: gl.constexpr = o.type.layout
    dims = gl.expand_dims(first + gl.arange(0, o.shape[1], gl.SliceLayout(0, layout)), 0)
    rows = gl.expand_dims(gl.convert_layout(offsets, gl.SliceLayout(1, layout)), 1)
    inside = gl.expand_dims(gl.convert_layout(row_ok, gl.SliceLayout(1, layout)), 1) & (dims < DV)
    gl.store(base + rows + dims, o.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def store_rows(base, offsets, row_ok, o, DV: gl.constexpr):
    """Write each part of O to ``base + offsets``."""
    _store_part(base, offsets, row_ok, o[0], 0, DV)
    if len(o) == 2:
        _store_part(base, offsets, row_ok, o[1], o[0].shape[1], DV)
