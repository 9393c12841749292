"""The gradient of what an expert activates: the first product of a backward, whose epilogue is the activation's derivative."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.moe.activation import activated_backward
from flashmoe_science.ops.moe.products.tiles import multiply, store_rows, tile_of

AT_ONCE = tl.constexpr(32)  # columns of the epilogue


@triton.jit
def _load_rows(base, rows, columns, tile, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Rows of a tile's expert, and of columns those below ``WIDTH``, in fp32; 0 elsewhere."""
    ptrs = base + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    return tl.load(ptrs, mask=(rows < tile.end)[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _finish(
    acc, column, rows, weight, z, dz, active, tile,
    WIDTH: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write dz and active of columns of dA' from ``column`` on, and return the sums of dA' times act(z), [rows]. Some columns
    after the others: intermediate values take registers."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    ROWS: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    if BLOCK_N > AT_ONCE:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, HALF]), [0, 2, 1]))
        sums = _finish(
            left, column, rows, weight, z, dz, active, tile, WIDTH, FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT, AT_ONCE
        )
        return sums + _finish(
            right, column + HALF, rows, weight, z, dz, active, tile, WIDTH, FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT, AT_ONCE
        )
    else:
        columns = column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        both = 2 * column + tl.arange(0, 2 * BLOCK_N)  # [2 BLOCK_N]
        if GATED and INTERLEAVED:
            gate, up = tl.split(tl.reshape(_load_rows(z, rows, both, tile, ROWS, ROWS), [BLOCK_M, BLOCK_N, 2]))
        else:
            gate = _load_rows(z, rows, columns, tile, WIDTH, ROWS)
            up = _load_rows(z + WIDTH, rows, columns, tile, WIDTH, ROWS) if GATED else gate
        act, of_gate, of_up = activated_backward(gate, up, weight * acc, FUNCTION, GATED, ALPHA, LIMIT)
        if active is not None:
            store_rows(weight * act, active, rows, columns, tile, WIDTH, WIDTH)
        if dz is not None:
            if GATED and INTERLEAVED:
                store_rows(tl.reshape(tl.join(of_gate, of_up), [BLOCK_M, 2 * BLOCK_N]), dz, rows, both, tile, ROWS, ROWS)
            else:
                store_rows(of_gate, dz, rows, columns, tile, WIDTH, ROWS)
                if GATED:
                    store_rows(of_up, dz + WIDTH, rows, columns, tile, WIDTH, ROWS)
        return tl.sum(acc * act, 1)  # of columns past the last 0


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_dhidden(
    dout, w, z, weights, dz, active, partials, tables, pairs, tiles,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """One tile of dA' = dout[token of row] . w[expert, n], and of what follows from it, unless that is None: dz, the gradient
    of z [rows, rows of w1]; active [rows, n], weight times act(z); partials [rows, tiles of n], sums of dA' times act(z)."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, tile = tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = tile.row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        pair = tl.load(tables + rows, mask=rows < tile.end, other=0)  # [BLOCK_M]
        columns = tile.column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        acc, _ = multiply(
            dout, w, tile, rows, pair // TOP_K, columns, even, WIDTH, None,
            DEPTH, STRIDE_X, STRIDE_E, STRIDE_N, STRIDE_K, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
        weight = tl.load(weights + pair).to(tl.float32)[:, None]  # [BLOCK_M, 1]
        sums = _finish(
            acc, tile.column, rows, weight, z, dz, active, tile, WIDTH, FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT, AT_ONCE
        )
        if partials is not None:
            COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
            tl.store(partials + rows.to(tl.int64) * COLUMNS + tile.column // BLOCK_N, sums, mask=rows < tile.end)
