"""What bwd_fused_gluon_sm90 serves, and the shape of its programs."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.backward.sizes import FUSED, QUERIES, suits_fused, widths
from flashmoe_science.ops.attention.device.tma import why_not_on_sm90
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported

WIDEST = 128  # columns of the tiles


def supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    refused = why_not_on_sm90(problem, device) or unsupported(problem.features, FUSED)
    if refused is None and width(problem) > WIDEST:
        return f"head dimensions up to {WIDEST}, not {max(problem.head_dim, problem.head_dim_v)}"
    return refused


def configs(problem: AttentionBackwardProblem, device: Device) -> tuple[Config, ...]:
    return (Config(block_m=QUERIES if width(problem) == 64 else QUERIES // 2, consumers=2, stages=2),)


def width(problem: AttentionBackwardProblem) -> int:
    """Columns of all tiles."""
    return max(widths(problem))


def threads(config: Config) -> int:
    """Two warpgroups of consumers, one of the producer and what adds to dQ; of 64 columns also one that multiplies for it."""
    return 512 if config["block_m"] == QUERIES else 384


def suits(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """Whether the fused kernel is the better guess than the split one."""
    return suits_fused(problem)
