"""The kernels of ``grouped_gluon_sm90.py``: two grouped products for Hopper, whose producers gather rows or copy them.

Programs are persistent: each takes tiles of 128 rows by 256 rows of weights. A producer fills a ring of stages 64 deep: weights
by the copy engine, rows of x gathered by cp.async, as the copy engine of Hopper cannot gather; the second product's rows stand
together, and the copy engine takes them too. Two consumer warpgroups of 64 rows multiply. One whose rows are past the expert's
end lets the stages pass, so that a tile that is half empty costs half.

Gates and ups alternate in eights of a tile's weights, by the dimensions in which the copy engine is told to see them: the gate
and the up of a column are in one thread, and weights stay as they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.gluon_bridge import as_gluon, cp_async, cp_async_arrive, tma_load, tma_store
from flashmoe_science.ops.moe.activation_triton import activated
from flashmoe_science.ops.moe.rows_triton import tables_of

# Of a tensor map in which rows have two more dimensions that wrap around 2^64 bytes, so that the copy engine leaves out rows
# past the end of an expert (triton.tools.ragged_tma).
RAGGED_EXTENT, RAGGED_ROWS, RAGGED_STRIDE = gl.constexpr(0x7FFF0000), gl.constexpr(2**30), 2**34

_activated = as_gluon(activated)
_tables_of = as_gluon(tables_of)


@gluon.jit
def _tile(index, tile_count, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(tile of rows, tile of columns) of an index: all columns of ``GROUP`` tiles of rows, then those of the next."""
    group = index // (GROUP * COLUMNS)
    inside = index % (GROUP * COLUMNS)
    height = gl.maximum(gl.minimum(tile_count - group * GROUP, GROUP), 1)
    return group * GROUP + inside % height, inside // height


@gluon.jit
def _expert_and_row(
    index, tile_count, tile_expert, tile_row, COLUMNS: gl.constexpr, GROUP: gl.constexpr, THERE_ARE_TILES: gl.constexpr
):  # fmt: skip
    """Of an index's tile; of some tile, or zeros, where the index is past the last one. A load without a mask is not waited for
    until it is used; one with a mask is at once."""
    tile, column = _tile(index, tile_count, COLUMNS, GROUP)
    if THERE_ARE_TILES:
        tile = gl.minimum(tile, tile_count - 1)
        return gl.load(tile_expert + tile), gl.load(tile_row + tile)
    else:
        exists = tile < tile_count
        return gl.load(tile_expert + tile, mask=exists, other=0), gl.load(tile_row + tile, mask=exists, other=0)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _gather(base, pair, present, smem, first, TOP_K: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr):
    """Start to copy columns from ``first`` of the rows of ``pair`` that are ``present``; the others become 0."""
    rows_layout: gl.constexpr = pair.type.layout
    layout: gl.constexpr = rows_layout.parent
    BLOCK_K: gl.constexpr = smem.shape[1]
    column = gl.expand_dims(first + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout)), 0)
    offset = gl.expand_dims((pair // TOP_K).to(gl.int64) * STRIDE, 1)
    mask = gl.expand_dims(present, 1)
    if DEPTH % BLOCK_K != 0:
        mask = mask & (column < DEPTH)
    cp_async(smem, base + offset + column, mask=mask)


@gluon.jit
def _produce_gathered(
    base, w_desc, tables, sizes, memory,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer of the first product: four warps. What they must know of a tile is loaded a tile ahead."""
    a_smem, w_smem, _, full, empty = memory
    pairs, tiles = sizes
    STAGES: gl.constexpr = w_smem.shape[0]
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    WEIGHTS: gl.constexpr = w_desc.block_type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pair_of_row, _, offsets, tile_expert, tile_row, tile_count, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    nth = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    programs = gl.num_programs(0)
    count = gl.load(tile_count)
    start = gl.program_id(0)
    expert, row = _expert_and_row(start, count, tile_expert, tile_row, COLUMNS, GROUP, False)
    end = gl.load(offsets + expert + 1)
    pair_0 = gl.load(pair_of_row + row + nth, mask=row + nth < end, other=0)
    pair_1 = gl.load(pair_of_row + row + ROWS + nth, mask=row + ROWS + nth < end, other=0)
    next_expert, next_row = _expert_and_row(start + programs, count, tile_expert, tile_row, COLUMNS, GROUP, False)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for index in range(start, count * COLUMNS, programs):
        tile, column = _tile(index, count, COLUMNS, GROUP)
        later_expert, later_row = _expert_and_row(index + 2 * programs, count, tile_expert, tile_row, COLUMNS, GROUP, True)
        next_end = gl.load(offsets + next_expert + 1)
        rows = next_row + nth
        next_pair_0 = gl.load(pair_of_row + rows, mask=rows < pairs, other=0)
        next_pair_1 = gl.load(pair_of_row + rows + ROWS, mask=rows + ROWS < pairs, other=0)
        both = end - row > ROWS
        for k in range(0, DEPTH, BLOCK_K):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(bar, w_desc.block_type.nbytes)
            tma_load(w_desc, [expert, column * WEIGHTS, 0, 0, k], bar, w_smem.index(stage))
            _gather(base, pair_0, row + nth < end, a_smem.index(2 * stage), k, TOP_K, DEPTH, STRIDE)
            if both:
                _gather(base, pair_1, row + ROWS + nth < end, a_smem.index(2 * stage + 1), k, TOP_K, DEPTH, STRIDE)
            cp_async_arrive(bar, increment_count=False)
            stage, phase = _advance(stage, phase, STAGES)
        expert = next_expert
        row = next_row
        end = next_end
        pair_0 = next_pair_0
        pair_1 = next_pair_1
        next_expert = later_expert
        next_row = later_row


@gluon.jit
def _produce_dense(
    a_desc, w_desc, tables, sizes, memory,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer of the second product: one warp. Rows past an expert's end are the next one's; no one stores them."""
    a_smem, w_smem, _, full, empty = memory
    pairs, tiles = sizes
    STAGES: gl.constexpr = w_smem.shape[0]
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1]
    _, _, offsets, tile_expert, tile_row, tile_count, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    programs = gl.num_programs(0)
    count = gl.load(tile_count)
    start = gl.program_id(0)
    expert, row = _expert_and_row(start, count, tile_expert, tile_row, COLUMNS, GROUP, False)
    end = gl.load(offsets + expert + 1)
    next_expert, next_row = _expert_and_row(start + programs, count, tile_expert, tile_row, COLUMNS, GROUP, False)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for index in range(start, count * COLUMNS, programs):
        tile, column = _tile(index, count, COLUMNS, GROUP)
        later_expert, later_row = _expert_and_row(index + 2 * programs, count, tile_expert, tile_row, COLUMNS, GROUP, True)
        next_end = gl.load(offsets + next_expert + 1)
        both = end - row > ROWS
        for k in range(0, DEPTH, BLOCK_K):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            if both:
                mbarrier.expect(bar, w_desc.block_type.nbytes + 2 * a_desc.block_type.nbytes)
            else:
                mbarrier.expect(bar, w_desc.block_type.nbytes + a_desc.block_type.nbytes)
            tma_load(w_desc, [expert, column * BLOCK_N, k], bar, w_smem.index(stage))
            tma_load(a_desc, [row, k], bar, a_smem.index(2 * stage))
            tma_load(a_desc, [row + ROWS, k], bar, a_smem.index(2 * stage + 1), pred=both)
            stage, phase = _advance(stage, phase, STAGES)
        expert = next_expert
        row = next_row
        end = next_end
        next_expert = later_expert
        next_row = later_row


@gluon.jit
def _silu(x):
    """x * sigmoid(x) by the hardware's reciprocal and power of two, each off by 2^-22 of its value, far below a rounding to 16
    bits. ``activated`` guards them against results below 2^-126, with twice the instructions; here those are 0."""
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], gl.float32, True, 1)
    return x * gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1.0], gl.float32, True, 1)


@gluon.jit
def _halves(block):
    """The left and the right half of the columns of a block, which stay in the threads that have them."""
    ROWS: gl.constexpr = block.shape[0]
    HALF: gl.constexpr = block.shape[1] // 2
    return block.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()


@gluon.jit
def _store(block, out_desc, row, end, column, left, right):
    """Write a block by way of shared memory, but for rows from ``end`` on and columns past the last one."""
    shape: gl.constexpr = [block.shape[0], block.shape[1] // 2]
    at = RAGGED_ROWS - (end - row)
    one, two = _halves(block.to(out_desc.dtype))
    tma.store_wait(1)  # the copy before the last has left its shared memory
    left.reshape(shape).store(one)
    fence_async_shared()
    tma_store(out_desc, [RAGGED_ROWS, end, at, column], left)
    tma.store_wait(1)
    right.reshape(shape).store(two)
    fence_async_shared()
    tma_store(out_desc, [RAGGED_ROWS, end, at, column + shape[1]], right)


@gluon.jit
def _multiply(
    acc, stage, phase, a_smem, w_smem, full, empty, CONSUMER: gl.constexpr, STEPS: gl.constexpr, GATHERED: gl.constexpr
):  # fmt: skip
    """acc, with ``STEPS`` stages of the ring; each is given back when the product after it has begun."""
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()  # cp.async writes as threads do, the matrix instruction reads as the copy engine does
        w = w_smem.index(stage).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(a_smem.index(2 * stage + CONSUMER), w, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), pred=step > 0)
        stage, phase = _advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
    return acc, stage, phase


@gluon.jit
def _consume(
    out_desc, tables, sizes, memory,
    CONSUMER: gl.constexpr, EXPERTS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of every tile of this program. Without ``FUNCTION`` the product is stored as it is."""
    a_smem, w_smem, out_smem, full, empty = memory
    pairs, tiles = sizes
    STAGES: gl.constexpr = w_smem.shape[0]
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    BLOCK_N: gl.constexpr = w_smem.numel // (STAGES * BLOCK_K)
    STEPS: gl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    _, _, offsets, tile_expert, tile_row, tile_count, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    programs = gl.num_programs(0)
    count = gl.load(tile_count)
    start = gl.program_id(0)
    expert, row = _expert_and_row(start, count, tile_expert, tile_row, COLUMNS, GROUP, False)
    end = gl.load(offsets + expert + 1)
    next_expert, next_row = _expert_and_row(start + programs, count, tile_expert, tile_row, COLUMNS, GROUP, False)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    left = out_smem.index(2 * CONSUMER)
    right = out_smem.index(2 * CONSUMER + 1)
    for index in range(start, count * COLUMNS, programs):
        tile, column = _tile(index, count, COLUMNS, GROUP)
        first = row + CONSUMER * ROWS
        if first < end:
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
            acc, stage, phase = _multiply(
                acc, stage, phase, a_smem, w_smem, full, empty, CONSUMER, STEPS, FUNCTION is not None
            )
            # Of the next tile: loaded while this one is stored.
            later_expert, later_row = _expert_and_row(index + 2 * programs, count, tile_expert, tile_row, COLUMNS, GROUP, True)
            next_end = gl.load(offsets + next_expert + 1)
            if FUNCTION is not None:
                gate, up = acc.reshape([ROWS, BLOCK_N // 16, 2, 8]).permute(0, 1, 3, 2).split()
                if FUNCTION == "silu":
                    active = _silu(gate) * up
                else:
                    active = _activated(gate, up, FUNCTION, True, ALPHA, LIMIT)
                _store(active.reshape([ROWS, BLOCK_N // 2]), out_desc, first, end, column * (BLOCK_N // 2), left, right)
            else:
                low, high = _halves(acc)
                _store(low, out_desc, first, end, column * BLOCK_N, left, right)
                _store(high, out_desc, first, end, column * BLOCK_N + BLOCK_N // 2, left, right)
        else:
            later_expert, later_row = _expert_and_row(index + 2 * programs, count, tile_expert, tile_row, COLUMNS, GROUP, True)
            next_end = gl.load(offsets + next_expert + 1)
            for step in range(STEPS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = _advance(stage, phase, STAGES)
        row = next_row
        end = next_end
        next_expert = later_expert
        next_row = later_row
    tma.store_wait(0)


@gluon.jit
def _memory(w_desc, out_desc, ROWS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """(stages of rows, stages of weights, stores, barriers of full stages, of empty ones); rows are in halves, one a consumer.
    A stage is full after ``ARRIVALS``."""
    dtype: gl.constexpr = w_desc.dtype
    RANK: gl.constexpr = len(w_desc.block_type.shape)
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[RANK - 1]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], dtype)
    a_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], a_layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [4] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return a_smem, w_smem, out_smem, full, empty


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up_gluon_sm90(
    x, w_desc, out_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_X: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The activated first product: out[row, n] = act(x[token of row] . w[expert, gate n], . w[expert, up n])."""
    gdc_launch_dependents()
    # A stage is full when 128 threads' copies are complete, and the weights.
    memory = _memory(w_desc, out_desc, out_desc.block_type.shape[2], STAGES, 129)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    sizes = (pairs, tiles)
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N // 2 - 1) // (BLOCK_N // 2)
    gl.warp_specialize(
        [
            (_consume, (out_desc, tables, sizes, memory, 0, EXPERTS, DEPTH, COLUMNS, GROUP, FUNCTION, ALPHA, LIMIT)),
            (_consume, (out_desc, tables, sizes, memory, 1, EXPERTS, DEPTH, COLUMNS, GROUP, FUNCTION, ALPHA, LIMIT)),
            (_produce_gathered, (x, w_desc, tables, sizes, memory, EXPERTS, TOP_K, DEPTH, STRIDE_X, COLUMNS, GROUP)),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down_gluon_sm90(
    a_desc, w_desc, out_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The second product: out[row, n] = a[row] . w[expert, n]."""
    gdc_launch_dependents()
    memory = _memory(w_desc, out_desc, a_desc.block_type.shape[0], STAGES, 1)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    sizes = (pairs, tiles)
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    gl.warp_specialize(
        [
            (_consume, (out_desc, tables, sizes, memory, 0, EXPERTS, DEPTH, COLUMNS, GROUP, None, 0.0, 0.0)),
            (_consume, (out_desc, tables, sizes, memory, 1, EXPERTS, DEPTH, COLUMNS, GROUP, None, 0.0, 0.0)),
            (_produce_dense, (a_desc, w_desc, tables, sizes, memory, EXPERTS, DEPTH, COLUMNS, GROUP)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )
