"""Device code that keeps one part of a GPU busy and nothing else, so that its pace is that part's ceiling."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flashmoe_nothing(values):
    """What a launch costs by itself."""


@triton.jit
def flashmoe_read(source, sums, tiles, REPEATS: tl.constexpr, BLOCK: tl.constexpr):
    """Every program adds up tiles of BLOCK fp32 in turn, REPEATS times over; .cg loads are served by the L2, not the L1."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(REPEATS):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            total += tl.load(source + tile.to(tl.int64) * BLOCK + offsets, cache_modifier=".cg")
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
