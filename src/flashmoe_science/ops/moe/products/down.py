"""The second product of grouped experts in portable Triton, and of their backward: a row for each pair, in ``rows.py``'s order.

Shapes: a [P, K], w [E, N, K] in any strides, or in a format -> out [P, N].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.moe.products.formats import multiply_weights
from flashmoe_science.ops.moe.products.tiles import store_rows, tile_of


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down(
    a, w, scale, zero_point, input_scale, bias, out, tables, pairs, tiles,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """The second product of one tile: out[row, n] = a[row] . w[expert, n]."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, tile = tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = tile.row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        columns = tile.column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        acc, _ = multiply_weights(
            a, w, scale, zero_point, input_scale, tile, rows, rows, columns, even, WIDTH, None,
            DEPTH, DEPTH, STRIDE_E, STRIDE_N, STRIDE_K, SCALES, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + tile.expert * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        store_rows(acc, out, rows, columns, tile, WIDTH, WIDTH)
