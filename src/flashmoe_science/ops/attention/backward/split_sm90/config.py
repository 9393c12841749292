"""What bwd_gluon_sm90 serves, and the shapes of its programs."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.backward.sizes import QUERIES, suits_fused, widths
from flashmoe_science.ops.attention.device.tma import why_not_on_sm90
from flashmoe_science.ops.attention.problem import head_parts
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported

SERVED = ("window", "softcap", "sinks", "packed")


def supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    return why_not_on_sm90(problem, device) or unsupported(problem.features, SERVED)


def configs(problem: AttentionBackwardProblem, device: Device) -> tuple[Config, ...]:
    """Shapes of the programs by head dimension (docs/notes/backward.md); ``consumers``, as records name them: tiles of keys."""
    width = max(widths(problem))
    if problem.features.softcap:  # with two tiles of keys it spills registers
        return (Config(block_m=64, consumers=1, stages=3 if width <= 128 else 2, warps_dq=8, stages_dq=4),)
    if width == 64:
        return (Config(block_m=128, consumers=2, stages=2, warps_dq=4, stages_dq=3),)
    if width == 128:
        return (Config(block_m=64, consumers=2, stages=2, warps_dq=4, stages_dq=3),)
    columns = [sum(head_parts(dim)) for dim in (problem.head_dim, problem.head_dim_v)]
    if max(columns) < 256 and sum(columns) <= 320:  # of dK and dV, in registers
        return (Config(block_m=32, consumers=2, stages=2, warps_dq=8, stages_dq=4),)
    return (Config(block_m=64, consumers=1, stages=2, warps_dq=8, stages_dq=4),)


def threads(config: Config) -> tuple[int, int]:
    """Threads of a program of the first kernel, which has two warpgroups of consumers, and of the second; each with a
    producer's."""
    return 32 * 8 + 128, 32 * config["warps_dq"] + 128


def suits(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """Tiles of queries and of keys should be full, and the fused kernel no better a guess."""
    return min(problem.seqlen_q, problem.seqlen_k) >= QUERIES and not suits_fused(problem)
