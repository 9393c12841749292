"""Attention backward of short sequences in portable Triton: dQ, dK and dV by one launch, without a workspace.

Shapes: Q, dQ [B, H, Sq, D], K, dK [B, Hk, Sk, D], V, dV [B, Hk, Sk, Dv], O, dO [B, H, Sq, Dv], LSE and its gradient [B, H, Sq];
fp16 and bf16, D and Dv from 1 to 256, padded to a power of two in registers only; sm_80 and up.

Of few tokens a launch takes as long as its products, and the host longer than the GPU. So tiles of keys and tiles of queries
are programs of one launch (program.py), whose loops are those of tiled_triton, and each sums delta = rowsum(dO O) - dLSE of the
queries that it reads. Scores are computed twice and O is read as often as dO, which is why longer sequences are not served so.
No two programs add to one result: all sums are fp32, in registers and in one order, and equal calls give equal bits.
"""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.backward.short_triton.config import configs, programs, suits, supports
from flashmoe_science.ops.attention.backward.short_triton.launch import ShortBackwardLauncher
from flashmoe_science.ops.attention.call.backward import our_kernel, run_planned
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem

NAME = "bwd_short_triton"


def launches(problem: AttentionBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    """The launch of a call that asks for every gradient."""
    p = problem
    count = sum(programs(config, p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k))
    return (Launch("^flashmoe_bwd_short_triton$", (count, 1, 1), 32 * config["num_warps"]),)


KERNEL = our_kernel(
    name=NAME,
    about="portable Triton: one launch for dQ, dK and dV of short sequences; deterministic",
    supports=supports,
    configs=configs,
    run=run_planned(ShortBackwardLauncher),
    launches=launches,
    plan=ShortBackwardLauncher,
    suits=suits,
    interpretable=True,
)
