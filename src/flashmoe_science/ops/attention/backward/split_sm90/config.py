"""What bwd_gluon_sm90 serves, the shapes of its programs, and the sizes of a call."""

from __future__ import annotations

from typing import NamedTuple

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.device.mask_triton import FAR
from flashmoe_science.ops.attention.device.tma import why_not_on_sm90
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import cdiv

KEYS, QUERIES = 64, 128  # of a consumer and its tiles of dS; of a program of dQ, all of whose tiles of dS are written
ROWS, ROWS_WARPS = 32, 4  # of a program that sums rows


def supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    return why_not_on_sm90(problem, device) or unsupported(problem.features)


def configs(problem: AttentionBackwardProblem, device: Device) -> tuple[Config, ...]:
    """Shapes of the programs by head dimension (docs/notes/backward.md)."""
    of_qk, of_v = widths(problem)
    if max(of_qk, of_v) == 64:
        return (Config(block_m=128, consumers=2, stages=2, warps_dq=4, stages_dq=3),)
    if max(of_qk, of_v) == 128:
        return (Config(block_m=64, consumers=2, stages=2, warps_dq=4, stages_dq=3),)
    return (Config(block_m=64, consumers=1, stages=2, warps_dq=8, stages_dq=4),)


def widths(problem: AttentionBackwardProblem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V and dO: powers of two, of which copies fill the rest with zeros."""
    return max(padded_head_dim(problem.head_dim), 64), max(padded_head_dim(problem.head_dim_v), 64)


def threads(config: Config) -> tuple[int, int]:
    """Threads of a program of the first kernel, which has eight warps of consumers, and of the second; each with a producer's
    warpgroup."""
    return 32 * 8 + 128, 32 * config["warps_dq"] + 128


class Sizes(NamedTuple):
    """Of a call: batches, heads of keys, query heads that share one, lengths; ``offset``: query i sees keys up to i + offset;
    and of the tiles: queries and keys of the first kernel's, columns of Q and K, of V and dO."""

    batch: int
    heads_kv: int
    group: int
    seqlen_q: int
    seqlen_k: int
    offset: int
    block_m: int
    block_n: int
    of_qk: int
    of_v: int

    @property
    def padded(self) -> int:
        """Rows of a head whose dS is computed: whole tiles of dQ."""
        return cdiv(self.seqlen_q, QUERIES) * QUERIES

    @property
    def steps(self) -> int:
        """Of a program of the first kernel: tiles of queries of all heads that share its keys."""
        return self.group * self.padded // self.block_m

    @property
    def tiles(self) -> int:
        """Programs of the first kernel for each head of keys."""
        return cdiv(self.seqlen_k, self.block_n)


def sizes_of(problem: AttentionBackwardProblem, config: Config) -> Sizes:
    return sizes_like(problem, config, problem.batch, problem.heads, problem.heads_kv, problem.seqlen_q, problem.seqlen_k)


def sizes_like(
    problem: AttentionBackwardProblem, config: Config, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int
) -> Sizes:
    """The Sizes of a call like the problem, with these numbers in place of its own."""
    offset = FAR if problem.mask == "full" else seqlen_k - seqlen_q if problem.mask == "causal" else 0
    tile = (config["block_m"], KEYS * config["consumers"])
    return Sizes(batch, heads_kv, heads // heads_kv, seqlen_q, seqlen_k, offset, *tile, *widths(problem))


def suits(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """Tiles of queries and of keys should be full."""
    return min(problem.seqlen_q, problem.seqlen_k) >= QUERIES
