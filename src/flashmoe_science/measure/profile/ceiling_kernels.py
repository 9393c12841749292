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


@triton.jit
def flashmoe_multiply_add(values, rounds, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """rounds * UNROLL fused multiply-adds of each of BLOCK fp32; the values come from memory, so that none is known before."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + index)
    slope = x * 0.5
    for _ in range(rounds):
        for _step in tl.static_range(UNROLL):
            x = x * slope + slope
    tl.store(values + index, x)


@triton.jit
def flashmoe_exp2(values, rounds, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """rounds * UNROLL exponentials of each of BLOCK fp32, each of the one before: 2^-x stays between 1/2 and 1."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + index)
    for _ in range(rounds):
        for _step in tl.static_range(UNROLL):
            x = tl.exp2(-x)
    tl.store(values + index, x)


@triton.jit
def flashmoe_read_shared(values, rounds, BLOCK: tl.constexpr):
    """rounds * 8 loads of 16 bytes from shared memory by each of BLOCK threads, neighbours side by side: no bank conflicts."""
    index = tl.arange(0, BLOCK)
    at = index * 16
    total = at * 0
    for _ in range(rounds):
        total += tl.inline_asm_elementwise(
            """
            {
            .shared .align 16 .b8 tile[4096];
            .reg .u32 from, a, b, c, d, e;
            mov.u32 from, tile;
            add.u32 from, from, $1;
            ld.volatile.shared.v4.u32 {a, b, c, d}, [from];
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 a, a, e;
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 a, a, e;
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 a, a, e;
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 a, a, e;
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 a, a, e;
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 a, a, e;
            ld.volatile.shared.v4.u32 {e, b, c, d}, [from];
            xor.b32 $0, a, e;
            }
            """,
            "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.store(values + tl.program_id(0) * BLOCK + index, total)
