"""What bwd_gluon_sm90 serves, the shapes of its programs, and the sizes of a call."""

from __future__ import annotations

from typing import NamedTuple

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.device.sm90 import FAR, window_of
from flashmoe_science.ops.attention.device.tma import why_not_on_sm90
from flashmoe_science.ops.attention.problem import head_parts, padded_head_dim
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import cdiv

KEYS, QUERIES = 64, 128  # of a consumer and its tiles of dS; of a program of dQ, all of whose tiles of dS are written
ROWS, ROWS_WARPS = 32, 4  # of a program that sums rows
SERVED = ("window", "softcap", "sinks", "packed")


def supports(problem: AttentionBackwardProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    return why_not_on_sm90(problem, device) or unsupported(problem.features, SERVED)


def configs(problem: AttentionBackwardProblem, device: Device) -> tuple[Config, ...]:
    """Shapes of the programs by head dimension (docs/notes/backward.md)."""
    width = 256 if problem.features.softcap else max(widths(problem))  # in the narrower programs a cap spills registers
    if width == 64:
        return (Config(block_m=128, consumers=2, stages=2, warps_dq=4, stages_dq=3),)
    if width == 128:
        return (Config(block_m=64, consumers=2, stages=2, warps_dq=4, stages_dq=3),)
    columns = [sum(head_parts(dim)) for dim in (problem.head_dim, problem.head_dim_v)]
    if not problem.features.softcap and max(columns) < 256 and sum(columns) <= 320:  # of dK and dV, in registers
        return (Config(block_m=32, consumers=2, stages=2, warps_dq=8, stages_dq=4),)
    return (Config(block_m=64, consumers=1, stages=2, warps_dq=8, stages_dq=4),)


def widths(problem: AttentionBackwardProblem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V and dO: powers of two, of which copies fill the rest with zeros."""
    return max(padded_head_dim(problem.head_dim), 64), max(padded_head_dim(problem.head_dim_v), 64)


def second_slices(problem: AttentionBackwardProblem, config: Config) -> tuple[int, int]:
    """Columns of the second slice of the tiles of Q and K, and of V and dO (columns.py), 0 of whole tiles. A lone consumer's
    two warpgroups have 16 or more each."""
    least = 32 // config["consumers"]
    of_qk, of_v = (head_parts(max(dim, 64))[1:] for dim in (problem.head_dim, problem.head_dim_v))
    return max(least, *of_qk) if of_qk else 0, max(least, *of_v) if of_v else 0


def threads(config: Config) -> tuple[int, int]:
    """Threads of a program of the first kernel, which has eight warps of consumers, and of the second; each with a producer's
    warpgroup."""
    return 32 * 8 + 128, 32 * config["warps_dq"] + 128


class Sizes(NamedTuple):
    """Sizes of a call: batches, key heads, query heads that share one, lengths; ``offset``: query i sees keys up to i + offset.
    Sizes of tiles: queries and keys of the first kernel, columns of Q and K, of V and dO. In a window query i sees keys
    from i + ``begin`` on; None without. Packed ``sequences``, of at most ``longest`` queries each, are one batch of all their
    rows, and offset and begin are from each one's own diagonal on; 0 where there are none."""

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
    begin: int | None = None
    sequences: int = 0
    longest: int = 0

    @property
    def padded(self) -> int:
        """Rows of a head in whole tiles of dQ."""
        return _tiles(self.seqlen_q, QUERIES, self.sequences) * QUERIES

    @property
    def band(self) -> int:
        """Tiles of queries of a head whose dS is written for a tile of keys, at the most: of windows and packed sequences as in
        band.py, else 0: those of all queries."""
        if self.begin is None and not self.sequences:
            return 0
        most = cdiv(self.longest or self.seqlen_q, QUERIES)
        if self.begin is not None:  # whole tiles that so many rows touch, wherever they begin
            most = min(most, (self.block_n + self.offset - self.begin + 2 * QUERIES - 2) // QUERIES)
        return most * QUERIES // self.block_m

    @property
    def of_band(self) -> tuple[int | None, ...]:
        """The last integers of kernels over keys and over queries, None for those that a call has no use of."""
        if not self.band:
            return (None,) * 5
        packed = (self.sequences, self.seqlen_q, self.seqlen_k) if self.sequences else (None,) * 3
        return (self.band, self.begin, *packed)

    @property
    def unit(self) -> int:
        """The fewest steps that a wave may have; it has a multiple of them."""
        return self.band or QUERIES // self.block_m

    @property
    def steps(self) -> int:
        """The steps of a program of the first kernel: tiles of queries of all heads that share its keys."""
        return self.group * (self.band or self.padded // self.block_m)

    @property
    def tiles(self) -> int:
        """Programs of the first kernel for each head of keys."""
        return _tiles(self.seqlen_k, self.block_n, self.sequences)

    def queries(self, steps: int) -> int:
        """Queries, of one head after another, of that many steps of a wave."""
        return steps // self.band * self.padded if self.band else steps * self.block_m


def _tiles(total: int, rows: int, sequences: int) -> int:
    """Tiles of ``rows`` rows of a head; of packed sequences each begins one of its own, and so do the rows after the last."""
    return total // rows + sequences + 1 if sequences else cdiv(total, rows)


def sizes_of(problem: AttentionBackwardProblem, config: Config) -> Sizes:
    heads = (problem.heads, problem.heads_kv)
    if problem.features.lengths == "packed":
        packed = (problem.batch, problem.seqlen_q)
        return sizes_like(problem, config, 1, *heads, problem.queries(), problem.keys(), *packed)
    return sizes_like(problem, config, problem.batch, *heads, problem.seqlen_q, problem.seqlen_k)


def sizes_like(
    problem: AttentionBackwardProblem, config: Config, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int,
    sequences: int = 0, longest: int = 0,
) -> Sizes:  # fmt: skip
    """The Sizes of a call like the problem, with these numbers in place of its own."""
    left, right = window_of(problem)
    diagonal = 0 if sequences or problem.mask == "causal-topleft" else seqlen_k - seqlen_q
    if problem.causal:
        right = 0
    tile = (config["block_m"], KEYS * config["consumers"])
    return Sizes(
        batch, heads_kv, heads // heads_kv, seqlen_q, seqlen_k, FAR if right is None else diagonal + right, *tile,
        *widths(problem), None if left is None else diagonal - left, sequences, min(longest, seqlen_q),
    )  # fmt: skip


def suits(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """Tiles of queries and of keys should be full, and the fused kernel no better a guess."""
    return min(problem.seqlen_q, problem.seqlen_k) >= QUERIES and not suits_fused(problem)


def suits_fused(problem: AttentionBackwardProblem) -> bool:
    """Whether fused_sm90 serves the problem faster: its columns more than half full, and its programs long."""
    half_full = 32 < max(problem.head_dim, problem.head_dim_v) <= 64
    return half_full and min(problem.seqlen_q, problem.seqlen_k) >= 1024 and unsupported(problem.features, ()) is None
