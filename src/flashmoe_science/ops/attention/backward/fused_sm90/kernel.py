"""Attention backward for Hopper in Gluon, fused: dQ, dK and dV by one kernel, each sum of dQ in the order of the keys.

Shapes: Q, dQ [B, H, Sq, D], K, dK [B, Hk, Sk, D], V, dV [B, Hk, Sk, Dv], O, dO [B, H, Sq, Dv], LSE and its gradient [B, H, Sq];
fp16 and bf16, D and Dv multiples of 8 up to 128, or packed sequences (problem/features.py). Compute capability 9.0 only.

A kernel first sums delta = rowsum(dO O) - dLSE, and with it the gradient of sinks (rows.py). The next (program.py) has programs
of 128 keys: two consumers of 64 keys each keep dK and dV in registers and put dS into shared memory. To 64 columns a third
warpgroup multiplies it by K (narrow.py). Above, where dK and dV take its registers, the consumers do, half of the columns each
(wide.py). What a tile of keys adds to dQ of a tile of queries is added in global memory, in fp32, once the tiles of keys before
it have added theirs: a counter of each tile of queries says whose turn it is. So equal calls give equal bits, and dS stays on
the chip: it would cross memory twice, 4 bytes a score, at 2 D operations.

No program waits for one that has not started: numbers are taken from a counter as programs start, and a program waits for lower
numbers alone. Of those that run, the lowest waits for none, so that all of them end. A turn counts the tiles of keys that any
of the queries sees, which are neighbours: one that a window hides, or without keys in use, neither adds nor is counted.

Under a causal mask programs that start together should neither meet nor leave SMs idle at the end, so heads take turns in two
orders. In a rising set of heads the last keys begin, each tile at the first queries that see it: it comes to a tile of queries
a step after the tile of keys whose turn is before its own, and the shortest programs end first, one after the other. In the
next set the first keys begin, at the last queries: programs start as those end, a step apart, the longest first, and end
together. Of windows and packed sequences all sets rise, as programs of several sequences end at once, so that those of a
falling set would start at once, and wait. All heads of the longest sequence come first: at the end short ones fill idle SMs.
"""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.backward.fused_sm90.config import configs, suits, supports, threads, width
from flashmoe_science.ops.attention.backward.fused_sm90.launch import FINISH, FINISH_WARPS, FusedBackwardLauncher, parts_of
from flashmoe_science.ops.attention.backward.rows import ROWS_WARPS
from flashmoe_science.ops.attention.backward.sizes import sizes_of
from flashmoe_science.ops.attention.call.backward import our_kernel, run_planned
from flashmoe_science.ops.attention.device.sinks_triton import SINKS_WARPS
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.launch import workspace_bytes

NAME = "bwd_fused_gluon_sm90"


def workspace(problem: AttentionBackwardProblem, config: Config) -> int:
    """Bytes of what stands between the launches."""
    sizes = sizes_of(problem, config)
    rows = sizes.batch * problem.heads * sizes.padded
    return workspace_bytes(parts_of(rows, width(problem), sizes.block_m, sizes.sequences))


def launches(problem: AttentionBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    sizes = sizes_of(problem, config)
    rows = sizes.batch * problem.heads * sizes.padded
    tiles = sizes.batch * problem.heads_kv * sizes.tiles
    of_sinks = Launch("^flashmoe_bwd_dsinks_triton$", (problem.heads, 1, 1), 32 * SINKS_WARPS)
    return (
        Launch("^flashmoe_bwd_rows_triton$", (rows // sizes.block_m, 1, 1), 32 * ROWS_WARPS),
        *([of_sinks] if problem.features.sinks else []),
        Launch("^flashmoe_bwd_fused_gluon_sm90$", (tiles, 1, 1), threads(config)),
        Launch("^flashmoe_bwd_scaled_triton$", (rows // FINISH, 1, 1), 32 * FINISH_WARPS),
    )


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper: dQ, dK and dV in one kernel, dQ in the order of the keys; deterministic",
    supports=supports,
    configs=configs,
    run=run_planned(FusedBackwardLauncher),
    launches=launches,
    plan=FusedBackwardLauncher,
    workspace=workspace,
    suits=suits,
)
