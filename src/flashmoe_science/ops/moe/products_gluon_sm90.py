"""The kernels of ``grouped_gluon_sm90.py``: two grouped products for Hopper, whose producers gather rows or copy them.

Programs are persistent: each takes tiles of 128 or 192 rows by 256 rows of weights. A producer fills a ring of stages 64
deep: weights by the copy engine, rows of x gathered by cp.async, as the copy engine of Hopper cannot gather; the second
product's rows stand together, and the copy engine takes them too. Two or three consumer warpgroups of 64 rows multiply. A
consumer whose rows are past the expert's end lets the stages pass and multiplies nothing.

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

SHIFT = gl.constexpr(37)  # programs by which a lap's tiles move on; any number that has no factor in common with 132
_activated = as_gluon(activated)
_tables_of = as_gluon(tables_of)


@gluon.jit
def _index(lap):
    """Of this program's tile of a lap. In a lap every program takes one tile, and which one moves on by ``SHIFT`` from lap to
    lap: an expert's last tile, with few rows, comes at regular distances, and must not always be the same programs'."""
    programs = gl.num_programs(0)
    return lap * programs + (gl.program_id(0) + lap * SHIFT) % programs


@gluon.jit
def _laps(tiles):
    """In how many laps this program has a tile."""
    whole = tiles // gl.num_programs(0)
    return whole + (_index(whole) < tiles).to(gl.int32)


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
def _produce_gathered(
    base, w_desc, tables, sizes, memory, tokens,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer of the first product: four warps. What they must know of a tile is loaded a tile ahead."""
    a_smem, w_smem, _, full, empty = memory
    pairs, tiles = sizes
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    WEIGHTS: gl.constexpr = w_desc.block_type.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    pair_of_row, _, offsets, tile_expert, tile_row, tile_count, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    count = gl.load(tile_count)
    expert, row = _expert_and_row(_index(0), count, tile_expert, tile_row, COLUMNS, GROUP, False)
    end = gl.load(offsets + expert + 1)
    next_expert, next_row = _expert_and_row(_index(1), count, tile_expert, tile_row, COLUMNS, GROUP, False)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for lap in range(_laps(count * COLUMNS)):
        tile, column = _tile(_index(lap), count, COLUMNS, GROUP)
        later_expert, later_row = _expert_and_row(_index(lap + 2), count, tile_expert, tile_row, COLUMNS, GROUP, True)
        next_end = gl.load(offsets + next_expert + 1)
        _keep_tokens(pair_of_row, row, end, tokens, layout, TOP_K)
        for k in range(0, DEPTH, BLOCK_K):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(bar, w_desc.block_type.nbytes)
            tma_load(w_desc, [expert, column * WEIGHTS, 0, 0, k], bar, w_smem.index(stage))
            _gather(base, tokens, end - row, a_smem, stage, k, layout, DEPTH, STRIDE)
            cp_async_arrive(bar, increment_count=False)
            stage, phase = _advance(stage, phase, STAGES)
        expert = next_expert
        row = next_row
        end = next_end
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
    CONSUMERS: gl.constexpr = a_smem.shape[0] // STAGES
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1]
    _, _, offsets, tile_expert, tile_row, tile_count, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    count = gl.load(tile_count)
    expert, row = _expert_and_row(_index(0), count, tile_expert, tile_row, COLUMNS, GROUP, False)
    end = gl.load(offsets + expert + 1)
    next_expert, next_row = _expert_and_row(_index(1), count, tile_expert, tile_row, COLUMNS, GROUP, False)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for lap in range(_laps(count * COLUMNS)):
        tile, column = _tile(_index(lap), count, COLUMNS, GROUP)
        later_expert, later_row = _expert_and_row(_index(lap + 2), count, tile_expert, tile_row, COLUMNS, GROUP, True)
        next_end = gl.load(offsets + next_expert + 1)
        present = gl.minimum((end - row + ROWS - 1) // ROWS, CONSUMERS)
        for k in range(0, DEPTH, BLOCK_K):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            for c in gl.static_range(CONSUMERS):
                mbarrier.expect(bar, w_desc.block_type.nbytes + (c + 1) * a_desc.block_type.nbytes, pred=present == c + 1)
            tma_load(w_desc, [expert, column * BLOCK_N, k], bar, w_smem.index(stage))
            for c in gl.static_range(CONSUMERS):
                tma_load(a_desc, [row + c * ROWS, k], bar, a_smem.index(CONSUMERS * stage + c), pred=c < present)
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
def _store_parts(
    parts, out_desc, row, end, part, memory, NTH: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr
):  # fmt: skip
    """Write the parts of a tile, of which the first is the ``part``-th of all columns."""
    block = parts[0]
    if FUNCTION is not None:
        block = _activated_part(block, FUNCTION, ALPHA, LIMIT, out_desc.dtype)
    WIDTH: gl.constexpr = block.shape[1]
    _store(block, out_desc, row, end, part * WIDTH, memory, NTH)
    if len(parts) > 1:
        AFTER: gl.constexpr = NTH + WIDTH // out_desc.block_type.shape[3]
        _store_parts(parts[1:], out_desc, row, end, part + 1, memory, AFTER, FUNCTION, ALPHA, LIMIT)


@gluon.jit
def _multiply(
    parts, stage, phase, a_smem, w_smem, full, empty, CONSUMER: gl.constexpr, STEPS: gl.constexpr, GATHERED: gl.constexpr
):  # fmt: skip
    """The sums of a tile's parts, of ``STEPS`` stages of the ring; each stage is given back when the product after it has
    begun."""
    STAGES: gl.constexpr = w_smem.shape[0]
    CONSUMERS: gl.constexpr = a_smem.shape[0] // STAGES
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    PARTS: gl.constexpr = len(parts)
    WIDTH: gl.constexpr = parts[0].shape[1]
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()  # cp.async writes as threads do, the matrix instruction reads as the copy engine does
        a = a_smem.index(CONSUMERS * stage + CONSUMER)
        w = w_smem.index(stage).reshape([PARTS * WIDTH, BLOCK_K])
        parts = [
            warpgroup_mma(a, w.slice(n * WIDTH, WIDTH).permute((1, 0)), parts[n], use_acc=step > 0, is_async=True)
            for n in (0, 1)[:PARTS]
        ]
        parts = warpgroup_mma_wait(PARTS, parts)
        if PARTS == 1:
            parts = (parts,)
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), pred=step > 0)
        stage, phase = _advance(stage, phase, STAGES)
    parts = warpgroup_mma_wait(0, parts)
    if PARTS == 1:
        parts = (parts,)
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
    return parts, stage, phase


@gluon.jit
def _consume(
    out_desc, tables, sizes, memory,
    CONSUMER: gl.constexpr, PARTS: gl.constexpr,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of every tile of this program, in ``PARTS`` accumulators side by side. Without ``FUNCTION`` the
    product is stored as it is."""
    a_smem, w_smem, out_smem, full, empty = memory
    pairs, tiles = sizes
    STAGES: gl.constexpr = w_smem.shape[0]
    ROWS: gl.constexpr = a_smem.shape[1]
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    BLOCK_N: gl.constexpr = w_smem.numel // (STAGES * BLOCK_K)
    STEPS: gl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    WIDTH: gl.constexpr = BLOCK_N // PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    _, _, offsets, tile_expert, tile_row, tile_count, _ = _tables_of(tables, pairs, EXPERTS, tiles)
    count = gl.load(tile_count)
    expert, row = _expert_and_row(_index(0), count, tile_expert, tile_row, COLUMNS, GROUP, False)
    end = gl.load(offsets + expert + 1)
    next_expert, next_row = _expert_and_row(_index(1), count, tile_expert, tile_row, COLUMNS, GROUP, False)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    buffers = (out_smem.index(2 * CONSUMER), out_smem.index(2 * CONSUMER + 1))
    for lap in range(_laps(count * COLUMNS)):
        tile, column = _tile(_index(lap), count, COLUMNS, GROUP)
        first = row + CONSUMER * ROWS
        if first < end:
            zeros = gl.zeros([ROWS, WIDTH], gl.float32, layout)
            parts = (zeros, zeros)[:PARTS]
            parts, stage, phase = _multiply(
                parts, stage, phase, a_smem, w_smem, full, empty, CONSUMER, STEPS, FUNCTION is not None
            )
            # Of the next tile: loaded while this one is stored.
            later_expert, later_row = _expert_and_row(_index(lap + 2), count, tile_expert, tile_row, COLUMNS, GROUP, True)
            next_end = gl.load(offsets + next_expert + 1)
            _store_parts(parts, out_desc, first, end, column * PARTS, buffers, 0, FUNCTION, ALPHA, LIMIT)
        else:
            later_expert, later_row = _expert_and_row(_index(lap + 2), count, tile_expert, tile_row, COLUMNS, GROUP, True)
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
def _memory(
    w_desc, out_desc, ROWS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr
):  # fmt: skip
    """(stages of rows, stages of weights, stores, barriers of full stages, of empty ones); each consumer has its ``ROWS`` of a
    stage. A stage is full after ``ARRIVALS``."""
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
    fence_async_shared()
    return a_smem, w_smem, out_smem, full, empty


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up_gluon_sm90(
    x, w_desc, out_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_X: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The activated first product: out[row, n] = act(x[token of row] . w[expert, gate n], . w[expert, up n])."""
    gdc_launch_dependents()
    # A stage is full when 128 threads' copies are complete, and the weights.
    memory = _memory(w_desc, out_desc, out_desc.block_type.shape[2], CONSUMERS, STAGES, 129)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(gl.int32, [CONSUMERS, out_desc.block_type.shape[2]], plain)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    sizes = (pairs, tiles)
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N // 2 - 1) // (BLOCK_N // 2)
    gl.warp_specialize(
        [
            (_consume, (out_desc, tables, sizes, memory, 0, PARTS, EXPERTS, DEPTH, COLUMNS, GROUP, FUNCTION, ALPHA, LIMIT)),
            (_produce_gathered, (x, w_desc, tables, sizes, memory, tokens, EXPERTS, TOP_K, DEPTH, STRIDE_X, COLUMNS, GROUP)),
            (_consume, (out_desc, tables, sizes, memory, 1, PARTS, EXPERTS, DEPTH, COLUMNS, GROUP, FUNCTION, ALPHA, LIMIT)),
            (_consume, (out_desc, tables, sizes, memory, 2, PARTS, EXPERTS, DEPTH, COLUMNS, GROUP, FUNCTION, ALPHA, LIMIT)),
        ][: CONSUMERS + 1],
        [4, 4, 4][:CONSUMERS],
        [PRODUCER_REGS, CONSUMER_REGS, CONSUMER_REGS][:CONSUMERS],
    )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down_gluon_sm90(
    a_desc, w_desc, out_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The second product: out[row, n] = a[row] . w[expert, n]."""
    gdc_launch_dependents()
    memory = _memory(w_desc, out_desc, a_desc.block_type.shape[0], CONSUMERS, STAGES, 1)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    sizes = (pairs, tiles)
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    gl.warp_specialize(
        [
            (_consume, (out_desc, tables, sizes, memory, 0, PARTS, EXPERTS, DEPTH, COLUMNS, GROUP, None, 0.0, 0.0)),
            (_produce_dense, (a_desc, w_desc, tables, sizes, memory, EXPERTS, DEPTH, COLUMNS, GROUP)),
            (_consume, (out_desc, tables, sizes, memory, 1, PARTS, EXPERTS, DEPTH, COLUMNS, GROUP, None, 0.0, 0.0)),
            (_consume, (out_desc, tables, sizes, memory, 2, PARTS, EXPERTS, DEPTH, COLUMNS, GROUP, None, 0.0, 0.0)),
        ][: CONSUMERS + 1],
        [1, 4, 4][:CONSUMERS],
        [PRODUCER_REGS, CONSUMER_REGS, CONSUMER_REGS][:CONSUMERS],
    )
