"""The kernels of ``grouped_gluon_sm90.py``: two grouped products for Hopper, whose producers gather rows or copy them.

Programs are persistent: each takes tiles of 128 rows by 256 rows of weights, the next by a counter that all share, as tiles
with few rows take less time. Tiles are in an order by expert (``nth_tile``): programs at work at the same time read few
experts' weights, and share them in L2.

A producer tells its consumers of a tile through shared memory and fills a ring of stages 64 deep: weights by the copy engine,
rows of x gathered by cp.async, as the copy engine of Hopper cannot gather; the second product's rows stand together, and the
copy engine takes them too. Two consumer warpgroups of 64 rows multiply. A consumer whose rows are past the expert's end lets
the stages pass and multiplies nothing.

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

from flashmoe_science.ops.descriptors import RAGGED_ROWS
from flashmoe_science.ops.gluon_bridge import as_gluon, cp_async, cp_async_arrive, tma_load, tma_store
from flashmoe_science.ops.moe.activation_triton import activated
from flashmoe_science.ops.moe.rows_triton import nth_tile, tables_of
from flashmoe_science.ops.pipeline_gluon import PipelineState, advance, first_stage, make_mailbox, publish, receive

LATE = gl.constexpr(6)  # stages before a tile's end at which its producer takes the next one: as long as it takes to look it up
_activated = as_gluon(activated)
_tables_of = as_gluon(tables_of)
_nth_tile = as_gluon(nth_tile)


@gluon.jit
def _keep_tokens(pair_of_row, row, end, smem, layout: gl.constexpr, TOP_K: gl.constexpr):
    """Write the tokens of rows from ``row`` to shared memory, which costs no registers; of the last row, from ``end`` on."""
    CONSUMERS: gl.constexpr = smem.shape[0]
    ROWS: gl.constexpr = smem.shape[1]
    for n in gl.static_range(CONSUMERS):
        rows = row + n * ROWS + gl.arange(0, ROWS, layout)
        smem.index(n).store(gl.load(pair_of_row + gl.minimum(rows, end - 1)) // TOP_K)


@gluon.jit
def _gather(base, tokens, rows, smem, stage, first, layout: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr):
    """Start to copy columns from ``first`` of x's rows of ``tokens`` to a stage, a block for each consumer: ``rows`` of them.
    The others become 0; a block of none but those is left as it is."""
    CONSUMERS: gl.constexpr = tokens.shape[0]
    ROWS: gl.constexpr = smem.shape[1]
    BLOCK_K: gl.constexpr = smem.shape[2]
    for n in gl.static_range(CONSUMERS):
        if n * ROWS < rows:
            column = gl.expand_dims(first + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout.parent)), 0)
            offset = gl.expand_dims(tokens.index(n).load(layout).to(gl.int64) * STRIDE, 1)
            mask = gl.expand_dims(n * ROWS + gl.arange(0, ROWS, layout) < rows, 1)
            if DEPTH % BLOCK_K != 0:
                mask = mask & (column < DEPTH)
            cp_async(smem.index(CONSUMERS * stage + n), base + offset + column, mask=mask)


@gluon.jit
def _fill(
    a, w_desc, memory, tokens, tile, stage, phase,
    START: gl.constexpr, STOP: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Copy columns from ``START`` to ``STOP`` of a tile's rows and weights to stages of the ring: x's rows of ``tokens``, or
    rows that stand together. Of the latter, those past an expert's end are the next one's; no one stores them."""
    a_smem, w_smem, _, full, empty, _ = memory
    expert, row, end, column = tile
    STAGES: gl.constexpr = w_smem.shape[0]
    CONSUMERS: gl.constexpr = a_smem.shape[0] // STAGES
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    WEIGHTS: gl.constexpr = w_desc.block_type.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    present = gl.minimum((end - row + ROWS - 1) // ROWS, CONSUMERS)
    for k in range(START, STOP, BLOCK_K):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        if tokens is None:
            for c in gl.static_range(CONSUMERS):
                mbarrier.expect(bar, w_desc.block_type.nbytes + (c + 1) * a.block_type.nbytes, pred=present == c + 1)
            tma_load(w_desc, [expert, column * WEIGHTS, k], bar, w_smem.index(stage))
            for c in gl.static_range(CONSUMERS):
                tma_load(a, [row + c * ROWS, k], bar, a_smem.index(CONSUMERS * stage + c), pred=c < present)
        else:
            mbarrier.expect(bar, w_desc.block_type.nbytes)
            tma_load(w_desc, [expert, column * WEIGHTS, 0, 0, k], bar, w_smem.index(stage))
            _gather(a, tokens, end - row, a_smem, stage, k, layout, DEPTH, STRIDE)
            cp_async_arrive(bar, increment_count=False)
        stage, phase = advance(PipelineState(stage, phase), STAGES)
    return stage, phase


@gluon.jit
def _produce(
    a, w_desc, tables, sizes, memory, tokens,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The producer of the first product: four warps, which gather; of the second, without ``tokens``: one warp. It takes a tile
    as late as it can look it up before the last one's stages are full, so that programs end at about the same time."""
    a_smem, w_smem, _, _, _, mailbox = memory
    pairs, tiles = sizes
    ROWS: gl.constexpr = a_smem.shape[0] // w_smem.shape[0] * a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    EARLY: gl.constexpr = max((DEPTH + BLOCK_K - 1) // BLOCK_K - LATE, 0) * BLOCK_K
    PRODUCT: gl.constexpr = 1 if tokens is None else 0
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pair_of_row, _, offsets, tile_expert, tile_row, tile_count, taken, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    index = gl.program_id(0)
    expert, row, end, column = _nth_tile(index, offsets, tile_expert, tile_row, tile_count, tiles, COLUMNS, GROUP, ROWS)
    stage, phase = first_stage()
    iteration = gl.to_tensor(0)
    while column >= 0:
        tile = (expert, row, end, column)
        publish(mailbox, iteration, (column, row, end), one)
        iteration += 1
        if tokens is not None:
            _keep_tokens(pair_of_row, row, end, tokens, layout, TOP_K)
        stage, phase = _fill(a, w_desc, memory, tokens, tile, stage, phase, 0, EARLY, DEPTH, STRIDE)
        index = gl.num_programs(0) + gl.atomic_add(taken + PRODUCT, 1, sem="relaxed")
        expert, row, end, column = _nth_tile(index, offsets, tile_expert, tile_row, tile_count, tiles, COLUMNS, GROUP, ROWS)
        stage, phase = _fill(a, w_desc, memory, tokens, tile, stage, phase, EARLY, DEPTH, DEPTH, STRIDE)
    publish(mailbox, iteration, (-1, 0, 0), one)


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
def _store(block, out_desc, row, end, column, memory, NTH: gl.constexpr):
    """Write a block by way of shared memory, but for rows from ``end`` on and columns past the last one. ``NTH``: its first
    copy's number among a tile's; copies take the buffers of ``memory`` in turn."""
    WIDTH: gl.constexpr = out_desc.block_type.shape[3]
    ROWS: gl.constexpr = block.shape[0]
    HALF: gl.constexpr = block.shape[1] // 2
    if HALF >= WIDTH:
        left, right = _halves(block)
        _store(left, out_desc, row, end, column, memory, NTH)
        _store(right, out_desc, row, end, column + HALF, memory, NTH + HALF // WIDTH)
    else:
        buffer = memory[NTH % len(memory)]
        tma.store_wait(len(memory) - 1)  # the last copy from this buffer has left it
        buffer.reshape([ROWS, WIDTH]).store(block.to(out_desc.dtype))
        fence_async_shared()
        tma_store(out_desc, [RAGGED_ROWS, end, RAGGED_ROWS - (end - row), column], buffer)


@gluon.jit
def _activated_part(acc, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, DTYPE: gl.constexpr):
    """Of products whose columns are gates and ups in turn, eight and eight. A few columns after the others: what is between
    takes registers."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1] // 2
    if WIDTH > 16:
        left, right = _halves(acc)
        one = _activated_part(left, FUNCTION, ALPHA, LIMIT, DTYPE)
        two = _activated_part(right, FUNCTION, ALPHA, LIMIT, DTYPE)
        return gl.join(one, two).permute(0, 2, 1).reshape([ROWS, WIDTH])
    else:
        gate, up = acc.reshape([ROWS, WIDTH // 8, 2, 8]).permute(0, 1, 3, 2).split()
        if FUNCTION == "silu":
            active = _silu(gate) * up
        else:
            active = _activated(gate, up, FUNCTION, True, ALPHA, LIMIT)
        return active.reshape([ROWS, WIDTH]).to(DTYPE)


@gluon.jit
def _multiply(
    acc, stage, phase, a_smem, w_smem, full, empty, CONSUMER: gl.constexpr, STEPS: gl.constexpr, GATHERED: gl.constexpr
):  # fmt: skip
    """The sums of ``STEPS`` stages of the ring; each stage is given back when the product after it has begun."""
    STAGES: gl.constexpr = w_smem.shape[0]
    CONSUMERS: gl.constexpr = a_smem.shape[0] // STAGES
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()  # cp.async writes as threads do, the matrix instruction reads as the copy engine does
        w = w_smem.index(stage).reshape([acc.shape[1], a_smem.shape[2]])
        acc = warpgroup_mma(
            a_smem.index(CONSUMERS * stage + CONSUMER), w.permute((1, 0)), acc, use_acc=step > 0, is_async=True
        )
        acc = warpgroup_mma_wait(1, (acc,))
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), pred=step > 0)
        stage, phase = advance(PipelineState(stage, phase), STAGES)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
    return acc, stage, phase


@gluon.jit
def _consume(
    out_desc, memory,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of every tile of this program. Without ``FUNCTION`` the product is stored as it is."""
    a_smem, w_smem, out_smem, full, empty, mailbox = memory
    STAGES: gl.constexpr = w_smem.shape[0]
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    BLOCK_N: gl.constexpr = w_smem.numel // (STAGES * BLOCK_K)
    STEPS: gl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stage, phase = first_stage()
    iteration = gl.to_tensor(0)
    buffers = (out_smem.index(2 * CONSUMER), out_smem.index(2 * CONSUMER + 1))
    column, row, end = receive(mailbox, iteration, one)
    while column >= 0:
        iteration += 1
        first = row + CONSUMER * ROWS
        if first < end:
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
            acc, stage, phase = _multiply(
                acc, stage, phase, a_smem, w_smem, full, empty, CONSUMER, STEPS, FUNCTION is not None
            )
            if FUNCTION is not None:
                active = _activated_part(acc, FUNCTION, ALPHA, LIMIT, out_desc.dtype)
                _store(active, out_desc, first, end, column * (BLOCK_N // 2), buffers, 0)
            else:
                _store(acc, out_desc, first, end, column * BLOCK_N, buffers, 0)
        else:
            for step in range(STEPS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = advance(PipelineState(stage, phase), STAGES)
        column, row, end = receive(mailbox, iteration, one)
    tma.store_wait(0)


@gluon.jit
def _memory(
    w_desc, out_desc, ROWS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr
):  # fmt: skip
    """(stages of rows, stages of weights, stores, barriers of full stages, of empty ones, the mailbox that tells of two tiles);
    each consumer has its ``ROWS`` of a stage. A stage is full after ``ARRIVALS``."""
    dtype: gl.constexpr = w_desc.dtype
    RANK: gl.constexpr = len(w_desc.block_type.shape)
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[RANK - 1]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], dtype)
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], a_layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [2 * CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    mailbox = make_mailbox(3, CONSUMERS)
    fence_async_shared()
    return a_smem, w_smem, out_smem, full, empty, mailbox


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up_gluon_sm90(
    x, w_desc, out_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_X: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The activated first product: out[row, n] = act(x[token of row] . w[expert, gate n], . w[expert, up n])."""
    gdc_launch_dependents()
    ROWS: gl.constexpr = out_desc.block_type.shape[2]
    # A stage is full when 128 threads' copies are complete, and the weights.
    memory = _memory(w_desc, out_desc, ROWS, BLOCK_M // ROWS, STAGES, 129)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(gl.int32, [BLOCK_M // ROWS, ROWS], plain)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    sizes = (pairs, tiles)
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N // 2 - 1) // (BLOCK_N // 2)
    gl.warp_specialize(
        [
            (_consume, (out_desc, memory, 0, DEPTH, FUNCTION, ALPHA, LIMIT)),
            (_produce, (x, w_desc, tables, sizes, memory, tokens, EXPERTS, TOP_K, DEPTH, STRIDE_X, COLUMNS, GROUP, 4)),
            (_consume, (out_desc, memory, 1, DEPTH, FUNCTION, ALPHA, LIMIT)),
        ],
        [4, 4],
        [PRODUCER_REGS, CONSUMER_REGS],
    )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down_gluon_sm90(
    a_desc, w_desc, out_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The second product: out[row, n] = a[row] . w[expert, n]."""
    gdc_launch_dependents()
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    memory = _memory(w_desc, out_desc, ROWS, BLOCK_M // ROWS, STAGES, 1)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    sizes = (pairs, tiles)
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    gl.warp_specialize(
        [
            (_consume, (out_desc, memory, 0, DEPTH, None, 0.0, 0.0)),
            (_produce, (a_desc, w_desc, tables, sizes, memory, None, EXPERTS, 1, DEPTH, 0, COLUMNS, GROUP, 1)),
            (_consume, (out_desc, memory, 1, DEPTH, None, 0.0, 0.0)),
        ],
        [1, 4],
        [PRODUCER_REGS, CONSUMER_REGS],
    )
