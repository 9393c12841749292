"""Attention backward in portable Triton: delta, then dK and dV by tiles of keys, then dQ by tiles of queries.

Shapes (problem/features.py has those of packed sequences): Q, dQ [B, H, Sq, D], K, dK [B, Hk, Sk, D], V, dV [B, Hk, Sk, Dv],
O, dO [B, H, Sq, Dv], LSE and its gradient [B, H, Sq], dSinks [H], dBias [B, H, Sq, Sk]; D and Dv from 1 to 256, padded to a
power of two in registers only. fp16, bf16 and fp32 (as six bf16 products); sm_80 and up.

With P = exp(scores - LSE), dP = dO V^T and delta = rowsum(dO O) - dLSE the gradient of scores is dS = P (dP - delta). Scores
are computed twice, for dK and dV (keys.py) and for dQ (queries.py), so that no two programs add to one result: all sums are
fp32, in registers and in one order, and equal calls give equal bits. Gradients that are not asked for are not computed.

The algebra: Dao et al. 2022 (FlashAttention); two loops in place of atomic adds: Triton's tutorial "Fused Attention".
"""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.backward.tiled_triton.config import (
    DELTA_ROWS,
    DELTA_WARPS,
    KEYS,
    QUERIES,
    configs,
    supports,
    tile_of,
)
from flashmoe_science.ops.attention.backward.tiled_triton.launch import TiledBackwardLauncher
from flashmoe_science.ops.attention.call.backward import our_kernel, run_planned
from flashmoe_science.ops.attention.device.sinks_triton import SINKS_WARPS
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.launch import cdiv

NAME = "bwd_triton"


def workspace(problem: AttentionBackwardProblem, config: Config) -> int:
    """Bytes of delta, and of the partials of the sinks' gradient."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    return 4 * rows + 4 * problem.batch * problem.heads * (cdiv(problem.seqlen_q, DELTA_ROWS) + 1) + 512


def launches(problem: AttentionBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    """The launches of a call that asks for every gradient."""
    keys, queries, features = tile_of(config, KEYS), tile_of(config, QUERIES), problem.features
    rows, batches = (problem.queries(), 1) if features.lengths == "packed" else (problem.seqlen_q, problem.batch)
    of_delta = cdiv(rows, DELTA_ROWS) * problem.heads * batches
    of_keys = cdiv(problem.seqlen_k, keys[1]) * problem.heads_kv * problem.batch
    of_queries = cdiv(problem.seqlen_q, queries[0]) * problem.heads * problem.batch
    made = [
        Launch("^flashmoe_bwd_dkdv_triton$", (of_keys, 1, 1), 32 * keys[2]),
        Launch("^flashmoe_bwd_dq_triton$", (of_queries, 1, 1), 32 * queries[2]),
        Launch("^flashmoe_bwd_delta_triton$", (of_delta, 1, 1), 32 * DELTA_WARPS),
    ]
    if features.sinks:
        made.append(Launch("^flashmoe_bwd_dsinks_triton$", (problem.heads, 1, 1), 32 * SINKS_WARPS))
    if features.bias == "additive":  # of what it is expanded by, there is one tile
        made.append(Launch("^flashmoe_bwd_dbias_triton$", None, 32 * queries[2]))
    return tuple(made)


KERNEL = our_kernel(
    name=NAME,
    about="portable Triton: a kernel for dK and dV, one for dQ; deterministic, every feature but caches",
    supports=supports,
    configs=configs,
    run=run_planned(TiledBackwardLauncher),
    launches=launches,
    plan=TiledBackwardLauncher,
    workspace=workspace,
    interpretable=True,
)
