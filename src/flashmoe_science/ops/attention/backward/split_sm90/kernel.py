"""Attention backward for Hopper in Gluon, split: dS to a workspace by one kernel, with dK and dV; dQ from it by another.

Shapes: Q, dQ [B, H, Sq, D], K, dK [B, Hk, Sk, D], V, dV [B, Hk, Sk, Dv], O, dO [B, H, Sq, Dv], LSE and its gradient [B, H, Sq];
fp16 and bf16, D and Dv multiples of 8 up to 256, or packed sequences (problem/features.py). Compute capability 9.0 only.

A kernel first sums delta = rowsum(dO O) - dLSE, and with it the gradient of sinks (rows.py). The first of two others (keys.py)
has a program for two tiles of 64 keys, or for one, where dK and dV of two are too many registers (two_tiles.py, one_tile.py): P
and dP of one tile of queries after another, of all heads that share the keys, dK and dV in registers; it writes
dS = P (dP - delta) to the workspace, in tiles of 64 keys. The second (queries.py) is a product, dQ = scale dS^T K. No two
programs add to one result: all sums are fp32, in one order, and equal calls give equal bits. Where scores are computed twice,
once for dK and dV and once for dQ, five products are seven.

The workspace has at most 1 GiB (waves.py): heads, bands of their keys and bands of their queries go by in waves. Sums that a
wave does not complete are kept in fp32 and taken up by another, so that the bits are those of one wave. Of a window it has for
each tile of keys the queries that see it; of packed sequences as many as the longest has (device/band.py). Of a head whose
columns are no power of two products leave out most of a tile's rest (columns.py).
"""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.backward.rows import ROWS, ROWS_WARPS
from flashmoe_science.ops.attention.backward.sizes import sizes_of
from flashmoe_science.ops.attention.backward.split_sm90.config import configs, suits, supports, threads
from flashmoe_science.ops.attention.backward.split_sm90.launch import SplitBackwardLauncher, parts_of_rows
from flashmoe_science.ops.attention.backward.split_sm90.waves import BUDGET, Waves, grids_of, space_of, waves_in_order, waves_of
from flashmoe_science.ops.attention.call.backward import our_kernel, run_planned
from flashmoe_science.ops.attention.device.sinks_triton import SINKS_WARPS
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.launch import workspace_bytes

NAME = "bwd_gluon_sm90"


def workspace(problem: AttentionBackwardProblem, config: Config) -> int:
    """Bytes of what stands between the launches, at most: of a wave the budget, and what three parts begin later."""
    sizes = sizes_of(problem, config)
    whole = space_of(Waves(sizes.batch * sizes.heads_kv, sizes.steps, sizes.tiles), sizes)
    of_wave = [(min(whole.bytes, BUDGET), torch.uint8), *[(1, torch.uint8)] * 3]
    return workspace_bytes([*parts_of_rows(sizes.batch * problem.heads * sizes.padded), *of_wave])


def launches(problem: AttentionBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    sizes, (threads_of_keys, threads_of_queries) = sizes_of(problem, config), threads(config)
    of_rows = sizes.padded // ROWS * problem.heads * sizes.batch
    made = [Launch("^flashmoe_bwd_rows_triton$", (of_rows, 1, 1), 32 * ROWS_WARPS)]
    for wave in waves_in_order(waves_of(sizes, gpu.sm_count), sizes):
        of_keys, of_queries = grids_of(wave, sizes)
        made.append(Launch("^flashmoe_bwd_dkdv_gluon_sm90$", of_keys, threads_of_keys))
        made.append(Launch("^flashmoe_bwd_dq_gluon_sm90$", of_queries, threads_of_queries))
    if problem.features.sinks:
        made.append(Launch("^flashmoe_bwd_dsinks_triton$", (problem.heads, 1, 1), 32 * SINKS_WARPS))
    return tuple(made)


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper: dK, dV and dS in one kernel, dQ in another; deterministic",
    supports=supports,
    configs=configs,
    run=run_planned(SplitBackwardLauncher),
    launches=launches,
    plan=SplitBackwardLauncher,
    workspace=workspace,
    suits=suits,
)
