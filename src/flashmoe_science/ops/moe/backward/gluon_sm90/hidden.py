"""The first product of a backward on Hopper: dA' = dout W2, and in its epilogue the activation's derivative.

Tiles are 128 rows by 128 columns. The producer is that of the forward's first product, and gathers rows of dout. After the last
stage of a tile's product come stages of z: 64 gates and the 64 ups that they go with, of each consumer's 64 rows, in the memory
of the weights and of dout. So z is read while the product runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.gluon_bridge import as_gluon, cp_async_arrive, reinterpret, tma_load
from flashmoe_science.ops.moe.activation import activated_backward
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import halves, multiply, sigmoid, store
from flashmoe_science.ops.moe.products.gluon_sm90.memory import make_memory
from flashmoe_science.ops.moe.products.gluon_sm90.producer import Low, deepened, fill, keep_tokens
from flashmoe_science.ops.moe.rows import tables_of, tile_at
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, publish, receive

AT_ONCE = gl.constexpr(16)  # columns of the epilogue
_activated_backward = as_gluon(activated_backward)
_tables_of = as_gluon(tables_of)
_tile_at = as_gluon(tile_at)


class Z(NamedTuple):
    """The descriptors of the gates and of the ups of z, of dz, and of active; of z a tile is [64, 64]."""

    gates: Any
    ups: Any
    of_gates: Any
    of_ups: Any
    active: Any


@gluon.jit
def _gates_of(memory):
    """The stages of the weights as blocks like those of dout."""
    BLOCKS: gl.constexpr = memory.w.numel // (memory.a.shape[1] * memory.a.shape[2])
    return reinterpret(memory.w, memory.a.dtype, [BLOCKS, memory.a.shape[1], memory.a.shape[2]], memory.a.layout)


@gluon.jit
def _fill_z(z, memory, tile, state, BLOCK_N: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Copy the z of a tile's rows to stages: of the rows past the expert's end in them, no one stores what comes of it."""
    STAGES: gl.constexpr = memory.w.shape[0]
    CONSUMERS: gl.constexpr = memory.a.shape[0] // STAGES
    ROWS: gl.constexpr = memory.a.shape[1]
    COLUMNS: gl.constexpr = memory.a.shape[2]
    gates = _gates_of(memory)
    PER_STAGE: gl.constexpr = gates.shape[0] // STAGES
    present = gl.minimum((tile.end - tile.row + ROWS - 1) // ROWS, CONSUMERS)
    for n in range(0, BLOCK_N, COLUMNS):
        bar = memory.full.index(state.stage)
        mbarrier.wait(memory.empty.index(state.stage), state.phase ^ 1)
        for c in gl.static_range(CONSUMERS):
            mbarrier.expect(bar, 2 * (c + 1) * z.gates.block_type.nbytes, pred=present == c + 1)
        first = tile.column * BLOCK_N + n
        second = first
        if INTERLEAVED:
            first, second = 2 * first, 2 * first + COLUMNS
        for c in gl.static_range(CONSUMERS):
            row = tile.row + c * ROWS
            tma_load(z.gates, [row, first], bar, gates.index(PER_STAGE * state.stage + c), pred=c < present)
            tma_load(z.ups, [row, second], bar, memory.a.index(CONSUMERS * state.stage + c), pred=c < present)
        cp_async_arrive(bar, increment_count=False)
        state = advance(state, STAGES)
    return state


@gluon.jit
def _produce(
    dout, w_desc, low, z, tables, counts, memory, tokens,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, RANK: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Fill the stages of all tiles of this program. The first clears the counters by which dW's programs take tiles."""
    pairs, tiles, counters = counts
    if gl.program_id(0) == 0:
        gl.store(tables + counters, 0)
        gl.store(tables + counters + 1, 0)
    ROWS: gl.constexpr = memory.a.shape[0] // memory.w.shape[0] * memory.a.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    parts = _tables_of(tables, pairs, EXPERTS, tiles)
    tile = _tile_at(gl.program_id(0), parts, tiles, COLUMNS, GROUP, ROWS)
    state = first_stage()
    iteration = gl.to_tensor(0)
    while tile.column >= 0:
        publish(memory.mailbox, iteration, (tile.column, tile.row, tile.end), one)
        iteration += 1
        keep_tokens(parts.pair_of_row, tile, tokens, layout, TOP_K)
        state = fill(dout, w_desc, memory, tokens, tile, state, 0, DEPTH, DEPTH, DEPTH, TRANSPOSED)
        if RANK != 0:
            state = fill(low.rows, low.w, memory, None, tile, state, 0, RANK, RANK, 0, TRANSPOSED, True)
        index = gl.num_programs(0) + gl.atomic_add(parts.counters, 1, sem="relaxed")
        following = _tile_at(index, parts, tiles, COLUMNS, GROUP, ROWS)
        state = _fill_z(z, memory, tile, state, BLOCK_N, INTERLEAVED)
        tile = following
    publish(memory.mailbox, iteration, (-1, 0, 0), one)


@gluon.jit
def _whole(left, right):
    """The block of which two are the ``halves``."""
    return gl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _load_z(first, second, like, INTERLEAVED: gl.constexpr):
    """The gates and the ups of a stage, in the layout of ``like``: of two blocks in turn, or of each half of the columns."""
    if INTERLEAVED:
        ROWS: gl.constexpr = like.shape[0]
        HALF: gl.constexpr = like.shape[1] // 2
        left, right = halves(like)
        layout: gl.constexpr = gl.join(left, right).reshape([ROWS, 2 * HALF]).type.layout
        gate_0, up_0 = first.load(layout).reshape([ROWS, HALF, 2]).split()
        gate_1, up_1 = second.load(layout).reshape([ROWS, HALF, 2]).split()
        return _whole(gate_0, gate_1), _whole(up_0, up_1)
    else:
        return first.load(like.type.layout), second.load(like.type.layout)


@gluon.jit
def _gradients(acc, gate, up, weight, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, DTYPE: gl.constexpr):
    """Of columns of dA' the gradients of their gates and ups, and weight times act(z), in ``DTYPE``; and dA' times act(z),
    summed over their groups of ``AT_ONCE``. A few columns after the others: intermediate values take registers."""
    WIDTH: gl.constexpr = acc.shape[1]
    if WIDTH > AT_ONCE:
        acc_0, acc_1 = halves(acc)
        gate_0, gate_1 = halves(gate)
        up_0, up_1 = halves(up)
        one = _gradients(acc_0, gate_0, up_0, weight, FUNCTION, ALPHA, LIMIT, DTYPE)
        two = _gradients(acc_1, gate_1, up_1, weight, FUNCTION, ALPHA, LIMIT, DTYPE)
        return _whole(one[0], two[0]), _whole(one[1], two[1]), _whole(one[2], two[2]), one[3] + two[3]
    else:
        gate, up = gate.to(gl.float32), up.to(gl.float32)
        scale = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, acc.type.layout)), 1)  # [ROWS, 1]
        act, of_gate, of_up = _activated_backward(gate, up, acc * scale, FUNCTION, True, ALPHA, LIMIT, sigmoid)
        return of_gate.to(DTYPE), of_up.to(DTYPE), (act * scale).to(DTYPE), acc * act


@gluon.jit
def _finish(acc, weight, state, z, memory, first, end, column, buffers, NTH: gl.constexpr, CONSUMER: gl.constexpr,
            FUNCTION: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):  # fmt: skip
    """Write what follows of a consumer's dA', a stage of z after the other; and dA' times act(z), summed as in _gradients."""
    STAGES: gl.constexpr = memory.w.shape[0]
    COLUMNS: gl.constexpr = memory.a.shape[2]
    HALF: gl.constexpr = acc.shape[1] // 2
    if HALF >= COLUMNS:
        left, right = halves(acc)
        one, state = _finish(
            left, weight, state, z, memory, first, end, column, buffers, NTH, CONSUMER, FUNCTION, INTERLEAVED, ALPHA, LIMIT
        )
        two, state = _finish(
            right, weight, state, z, memory, first, end, column + HALF, buffers, NTH + 3 * (HALF // COLUMNS), CONSUMER,
            FUNCTION, INTERLEAVED, ALPHA, LIMIT,
        )  # fmt: skip
        return one + two, state
    else:
        gates = _gates_of(memory)
        PER_STAGE: gl.constexpr = gates.shape[0] // STAGES
        mbarrier.wait(memory.full.index(state.stage), state.phase)
        second = memory.a.index(memory.a.shape[0] // STAGES * state.stage + CONSUMER)
        gate, up = _load_z(gates.index(PER_STAGE * state.stage + CONSUMER), second, acc, INTERLEAVED)
        mbarrier.arrive(memory.empty.index(state.stage))
        of_gate, of_up, active, sums = _gradients(acc, gate, up, weight, FUNCTION, ALPHA, LIMIT, z.active.dtype)
        if INTERLEAVED:
            both = gl.join(of_gate, of_up).reshape([acc.shape[0], 2 * acc.shape[1]])
            store(both, z.of_gates, first, end, 2 * column, buffers, NTH)
        else:
            store(of_gate, z.of_gates, first, end, column, buffers, NTH)
            store(of_up, z.of_ups, first, end, column, buffers, NTH + 1)
        store(active, z.active, first, end, column, buffers, NTH + 2)
        return sums, advance(state, STAGES)


@gluon.jit
def _consume(
    z, weights, partials, tables, memory,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
    FUNCTION: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The 64 rows of one consumer of every tile of this program."""
    STAGES: gl.constexpr = memory.w.shape[0]
    ROWS: gl.constexpr = memory.a.shape[1]
    BLOCK_K: gl.constexpr = memory.a.shape[2]
    BLOCK_N: gl.constexpr = memory.w.numel // (STAGES * BLOCK_K)
    STEPS: gl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration = gl.to_tensor(0)
    buffers = (memory.out.index(2 * CONSUMER), memory.out.index(2 * CONSUMER + 1))
    column, row, end = receive(memory.mailbox, iteration, one)
    while column >= 0:
        iteration += 1
        first = row + CONSUMER * ROWS
        if first < end:
            rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))  # [ROWS]
            pair = gl.load(tables + rows, mask=rows < end, other=0)
            weight = gl.load(weights + pair).to(gl.float32)
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
            acc, state = multiply(acc, state, memory, CONSUMER, STEPS, True, TRANSPOSED)
            sums, state = _finish(
                acc, weight, state, z, memory, first, end, column * BLOCK_N, buffers, 0, CONSUMER,
                FUNCTION, INTERLEAVED, ALPHA, LIMIT,
            )  # fmt: skip
            total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, layout))
            gl.store(partials + rows.to(gl.int64) * COLUMNS + column, total, mask=rows < end)
        else:
            for step in range(STEPS + BLOCK_N // BLOCK_K):
                mbarrier.wait(memory.full.index(state.stage), state.phase)
                mbarrier.arrive(memory.empty.index(state.stage))
                state = advance(state, STAGES)
        column, row, end = receive(memory.mailbox, iteration, one)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["pairs", "tiles", "counters"])
def flashmoe_moe_dhidden_gluon_sm90(
    dout, w_desc, gates_desc, ups_desc, of_gates_desc, of_ups_desc, active_desc, low_desc, beside_desc,
    weights, partials, tables, pairs, tiles, counters,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr,
    FUNCTION: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, RANK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """dA' = dout[token of row] . w[expert, n], or ``TRANSPOSED`` . w[expert, :, n], and what follows from it: dz, weight times
    act(z), and partials [rows, tiles of n], the sums of dA' times act(z). ``INTERLEAVED``: gates and ups of z alternate, and
    both descriptors of z, and of dz, are of all of it. With a ``RANK`` dA' has low[row] . beside[expert, as w] too."""
    gdc_launch_dependents()
    ROWS: gl.constexpr = active_desc.block_type.shape[2]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1 if TRANSPOSED else 2]
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    # A stage is full when 128 threads' copies are complete, and the copy engine's.
    memory = make_memory(w_desc, active_desc, ROWS, BLOCK_K, BLOCK_M // ROWS, STAGES, 129)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(gl.int32, [BLOCK_M // ROWS, ROWS], plain)
    z = Z(gates_desc, ups_desc, of_gates_desc, of_ups_desc, active_desc)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    DEEP: gl.constexpr = deepened(DEPTH, RANK, BLOCK_K)
    low = Low(low_desc, beside_desc)
    gl.warp_specialize(
        [
            (_consume, (
                z, weights, partials, tables, memory, 0, DEEP, COLUMNS, TRANSPOSED, FUNCTION, INTERLEAVED, ALPHA, LIMIT,
            )),
            (_produce, (
                dout, w_desc, low, z, tables, (pairs, tiles, counters), memory, tokens, EXPERTS, TOP_K, DEPTH, RANK, COLUMNS,
                BLOCK_N, GROUP, TRANSPOSED, INTERLEAVED,
            )),
            (_consume, (
                z, weights, partials, tables, memory, 1, DEEP, COLUMNS, TRANSPOSED, FUNCTION, INTERLEAVED, ALPHA, LIMIT,
            )),
        ],
        [4, 4],
        [PRODUCER_REGS, CONSUMER_REGS],
    )
