"""The gradient of an expert's weights on Hopper: a product over its rows, in their order, of two operands that lie by rows.

Shapes: left [T or rows, M], right [rows or T, N] -> out [E, M, N], by tiles of 128 by 256. One of the two is gathered by the
rows' tokens, by cp.async of four warps; the other's rows follow each other, and the copy engine takes them, zeros from the
expert's end on. Both are transposed as the matrix instruction reads them from shared memory. Programs are persistent and take
tiles by a counter, those of an expert at about the same time, whose rows they share in L2.
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
from flashmoe_science.ops.gluon_bridge import as_gluon, cp_async, cp_async_arrive, tma_load
from flashmoe_science.ops.moe.products.gluon_sm90 import config
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import halves, store
from flashmoe_science.ops.moe.products.gluon_sm90.memory import Memory
from flashmoe_science.ops.moe.rows import tables_of
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers, make_mailbox, publish, receive

_tables_of = as_gluon(tables_of)


ROWS, STORE_COLUMNS = gl.constexpr(config.ROWS), gl.constexpr(config.STORE_COLUMNS)
AT_ONCE = gl.constexpr(32)  # columns that are added


@gluon.jit
def _make_memory(dtype: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Stages of left [BLOCK_K, 64] of each consumer, and of right [BLOCK_K, BLOCK_N]; full after 128 threads' copies and the
    copy engine's."""
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_K, ROWS], dtype)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_K, BLOCK_N], dtype)
    a = gl.allocate_shared_memory(dtype, [STAGES * 2, 1, 1, BLOCK_K, ROWS], a_layout)
    w = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_N], w_layout)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, STORE_COLUMNS], dtype)
    out = gl.allocate_shared_memory(dtype, [4, 1, 1, ROWS, STORE_COLUMNS], out_layout)
    full, empty = make_barriers(STAGES, 2, 129)
    mailbox = make_mailbox(4, 2)
    fence_async_shared()
    return Memory(a, w, out, full, empty, mailbox)


@gluon.jit
def _gather(
    base, tokens, inside, memory, column, layout: gl.constexpr, WIDTH: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr
):
    """Start to copy columns from ``column`` of the rows of ``tokens``; those not ``inside``, and past ``WIDTH``, become 0. A
    tile has ``SPAN`` columns."""
    BLOCK: gl.constexpr = memory.shape[1]
    columns = gl.expand_dims(column + gl.arange(0, BLOCK, gl.SliceLayout(0, layout.parent)), 0)  # [1, BLOCK]
    mask = gl.expand_dims(inside, 1)
    if WIDTH % SPAN != 0:
        mask = mask & (columns < WIDTH)
    cp_async(memory, base + gl.expand_dims(tokens.to(gl.int64) * STRIDE, 1) + columns, mask=mask)


@gluon.jit
def _produce(
    left, right, tables, counts, memory,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr,
    LEFT_GATHERED: gl.constexpr,
):  # fmt: skip
    """Fill the stages of all tiles of this program. A step's tokens are looked up during the step before it."""
    pairs, tiles, counter = counts
    STAGES: gl.constexpr = memory.w.shape[0]
    BLOCK_K: gl.constexpr = memory.a.shape[3]
    BLOCK_N: gl.constexpr = memory.w.shape[4]
    DOWN: gl.constexpr = (HEIGHT + 2 * ROWS - 1) // (2 * ROWS)
    ACROSS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    parts = _tables_of(tables, pairs, EXPERTS, tiles)
    step = gl.arange(0, BLOCK_K, layout)  # [BLOCK_K]
    state = first_stage()
    iteration = gl.to_tensor(0)
    index = gl.program_id(0)
    while index < EXPERTS * DOWN * ACROSS:
        expert = index // (DOWN * ACROSS)
        m, n = index // ACROSS % DOWN, index % ACROSS
        first, end = gl.load(parts.offsets + expert), gl.load(parts.offsets + expert + 1)
        publish(memory.mailbox, iteration, (n, m, expert, (end - first + BLOCK_K - 1) // BLOCK_K), one)
        iteration += 1
        pair = gl.load(parts.pair_of_row + first + step, mask=first + step < end, other=0)
        for row in range(first, end, BLOCK_K):
            inside, tokens = row + step < end, pair // TOP_K
            following = row + BLOCK_K + step
            pair = gl.load(parts.pair_of_row + following, mask=following < end, other=0)
            bar = memory.full.index(state.stage)
            mbarrier.wait(memory.empty.index(state.stage), state.phase ^ 1)
            at = RAGGED_ROWS - (end - row)
            if LEFT_GATHERED:
                mbarrier.expect(bar, right.block_type.nbytes)
                tma_load(right, [RAGGED_ROWS, end, at, n * BLOCK_N], bar, memory.w.index(state.stage))
                for c in gl.static_range(2):
                    a = memory.a.index(2 * state.stage + c).reshape([BLOCK_K, ROWS])
                    _gather(left, tokens, inside, a, (2 * m + c) * ROWS, layout, HEIGHT, 2 * ROWS, STRIDE)
            else:
                mbarrier.expect(bar, 2 * left.block_type.nbytes)
                for c in gl.static_range(2):
                    a = memory.a.index(2 * state.stage + c)
                    tma_load(left, [RAGGED_ROWS, end, at, (2 * m + c) * ROWS], bar, a)
                w = memory.w.index(state.stage).reshape([BLOCK_K, BLOCK_N])
                _gather(right, tokens, inside, w, n * BLOCK_N, layout, WIDTH, BLOCK_N, STRIDE)
            cp_async_arrive(bar, increment_count=False)
            state = advance(state, STAGES)
        index = gl.num_programs(0) + gl.atomic_add(tables + counter, 1, sem="relaxed")
    publish(memory.mailbox, iteration, (-1, 0, 0, 0), one)


@gluon.jit
def _add(acc, out, first, column, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr):
    """Add a block to a matrix [HEIGHT, WIDTH] from a row and a column on. A few columns after the others: what is added to
    takes registers."""
    HALF: gl.constexpr = acc.shape[1] // 2
    if HALF >= AT_ONCE:
        left, right = halves(acc)
        _add(left, out, first, column, HEIGHT, WIDTH, STRIDE)
        _add(right, out, first, column + HALF, HEIGHT, WIDTH, STRIDE)
    else:
        rows = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout)), 1)  # [ROWS, 1]
        columns = gl.expand_dims(column + gl.arange(0, 2 * HALF, gl.SliceLayout(0, acc.type.layout)), 0)
        at = out + rows.to(gl.int64) * STRIDE + columns
        inside = (rows < HEIGHT) & (columns < WIDTH)
        total = acc + gl.load(at, mask=inside, other=0.0).to(gl.float32)
        gl.store(at, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _consume(
    out, memory,
    CONSUMER: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_M: gl.constexpr,
):  # fmt: skip
    """The 64 rows of one consumer of every tile of this program."""
    STAGES: gl.constexpr = memory.w.shape[0]
    BLOCK_K: gl.constexpr = memory.a.shape[3]
    BLOCK_N: gl.constexpr = memory.w.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration = gl.to_tensor(0)
    n, m, expert, steps = receive(memory.mailbox, iteration, one)
    while n >= 0:
        iteration += 1
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        for step in range(steps):
            stage = state.stage
            mbarrier.wait(memory.full.index(stage), state.phase)
            fence_async_shared()  # cp.async writes as threads do, the matrix instruction reads as the copy engine does
            a = memory.a.index(2 * stage + CONSUMER).reshape([BLOCK_K, ROWS]).permute((1, 0))  # [ROWS, BLOCK_K]
            w = memory.w.index(stage).reshape([BLOCK_K, BLOCK_N])
            acc = warpgroup_mma(a, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            before = gl.where(stage == 0, STAGES - 1, stage - 1)
            mbarrier.arrive(memory.empty.index(before), pred=step > 0)
            state = advance(state, STAGES)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(memory.empty.index(gl.where(state.stage == 0, STAGES - 1, state.stage - 1)), pred=steps > 0)
        first = (2 * m + CONSUMER) * ROWS
        if STRIDE_M is None:
            buffers = (memory.out.index(2 * CONSUMER), memory.out.index(2 * CONSUMER + 1))
            store(acc, out, (expert, first), None, n * BLOCK_N, buffers, 0)
        else:
            _add(acc, out + expert.to(gl.int64) * STRIDE_E, first, n * BLOCK_N, HEIGHT, WIDTH, STRIDE_M)
        n, m, expert, steps = receive(memory.mailbox, iteration, one)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["pairs", "tiles", "counter"])
def flashmoe_moe_dweights_gluon_sm90(
    left, right, out, tables, pairs, tiles, counter,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr,
    LEFT_GATHERED: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """out[expert, m, n] = the sum over its rows of left[row, m] times right[row, n], one of which is gathered by tokens.
    ``out``: a descriptor; or a pointer to what is added to, where there are strides."""
    gdc_launch_dependents()
    if LEFT_GATHERED:
        memory = _make_memory(right.dtype, BLOCK_N, BLOCK_K, STAGES)
    else:
        memory = _make_memory(left.dtype, BLOCK_N, BLOCK_K, STAGES)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    gl.warp_specialize(
        [
            (_consume, (out, memory, 0, HEIGHT, WIDTH, STRIDE_E, STRIDE_M)),
            (_produce, (
                left, right, tables, (pairs, tiles, counter), memory, EXPERTS, TOP_K, HEIGHT, WIDTH, STRIDE, LEFT_GATHERED,
            )),
            (_consume, (out, memory, 1, HEIGHT, WIDTH, STRIDE_E, STRIDE_M)),
        ],
        [4, 4],
        [PRODUCER_REGS, CONSUMER_REGS],
    )
