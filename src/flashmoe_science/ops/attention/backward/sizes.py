"""Of both of Hopper's backwards: the sizes of a call and of tiles, and which of the two is the better guess."""

from __future__ import annotations

from typing import NamedTuple

from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.device import band
from flashmoe_science.ops.attention.device.sm90 import FAR, window_of
from flashmoe_science.ops.attention.problem import head_parts, padded_head_dim
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import cdiv

KEYS: int = band.KEYS.value
QUERIES: int = band.QUERIES.value
FUSED = ("window", "sinks", "packed")  # what fused_sm90 serves besides plain problems


def widths(problem: AttentionBackwardProblem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V and dO: powers of two, of which copies fill the rest with zeros."""
    return max(padded_head_dim(problem.head_dim), 64), max(padded_head_dim(problem.head_dim_v), 64)


def second_slices(problem: AttentionBackwardProblem) -> tuple[int, int]:
    """Columns of the second slice of the tiles of Q and K, and of V and dO (columns.py), 0 of whole tiles."""
    of_qk, of_v = (head_parts(max(dim, 64))[1:] for dim in (problem.head_dim, problem.head_dim_v))
    return max(16, *of_qk) if of_qk else 0, max(16, *of_v) if of_v else 0


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


def suits_fused(problem: AttentionBackwardProblem) -> bool:
    """Whether fused_sm90 serves the problem faster (docs/notes/backward.md): its columns more than half full, and its programs
    long; above 64 columns longer where heads share keys, as each brings its queries to L2 anew."""
    columns, grouped = max(problem.head_dim, problem.head_dim_v), problem.heads > problem.heads_kv
    if not 32 < columns <= 128 or unsupported(problem.features, FUSED) is not None:
        return False
    least = 1024 if columns <= 64 else 4096 if grouped else 2048
    return min(problem.seqlen_q, problem.seqlen_k) >= least
