"""What bwd_gluon_sm90 serves, the shapes of its programs, and its waves: what part of dS is in the workspace at a time."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.device.tma import why_not_on_sm90
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import Grid, cdiv

KEYS, QUERIES = 64, 128  # of a tile of dS, and of a program of dQ
ROWS, ROWS_WARPS = 32, 4  # of a program that sums rows
BUDGET = 2**30  # bytes of the workspace: it does not depend on the memory that is free, nor the bits on it
FAR = 2**30  # of the diagonal where there is none: every query sees every key
MOST_TOGETHER = 8  # heads whose tiles go out in turns, so that Q, K, V and dO of them stay in the L2 cache
# Of a wave, in steps of a program: a program's own start and end, and the launches of both kernels.
START, LAUNCH = 3, 4
MOST_PROGRAMS = 8  # of a wave for each processor, that are counted


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


class Sizes(NamedTuple):
    """Of a call: heads of keys over all batches, query heads that share one, and lengths; ``offset``: a query i sees keys up to
    i + offset."""

    batch: int
    heads_kv: int
    group: int
    seqlen_q: int
    seqlen_k: int
    offset: int

    @property
    def padded(self) -> int:
        """Rows of a head whose dS is computed: whole tiles of dQ."""
        return cdiv(self.seqlen_q, QUERIES) * QUERIES


class Wave(NamedTuple):
    """Heads of keys, and steps of the programs of each."""

    first_head: int
    heads: int
    first_step: int
    end_step: int


class Waves(NamedTuple):
    """A wave has ``heads`` heads of keys, and of each program's ``all_steps`` tiles of queries ``steps``."""

    heads: int
    steps: int
    all_steps: int

    @property
    def banded(self) -> bool:
        """Whether a program's sums are kept from wave to wave."""
        return self.steps < self.all_steps


def sizes_of(problem: AttentionBackwardProblem, batch: int, heads_kv: int, seqlen_q: int, seqlen_k: int) -> Sizes:
    offset = FAR if problem.mask == "full" else seqlen_k - seqlen_q if problem.mask == "causal" else 0
    return Sizes(batch, heads_kv, problem.heads // problem.heads_kv, seqlen_q, seqlen_k, offset)


def waves_of(sizes: Sizes, config: Config, width: int, sm_count: int) -> Waves:
    """The waves that are the quickest by a count of steps, of those whose workspace is within BUDGET. ``width``: columns of dK
    and dV together.

    A program takes as many steps as queries that share its keys have tiles. The programs of a wave should be just below a
    multiple of the processors; under a causal mask the longest of them takes twice the mean.
    """
    heads, best, least = sizes.batch * sizes.heads_kv, None, float("inf")
    for count in range(1, min(heads, MOST_PROGRAMS * sm_count) + 1):
        waves = _fitting(count, sizes, config, width)
        if waves is None:
            break
        whole, rest = divmod(heads, count)
        time = whole * _time(count, waves, sizes, config, sm_count) + (_time(rest, waves, sizes, config, sm_count) if rest else 0.0)
        if time < least:
            best, least = waves, time
    assert best is not None
    return best


def _time(heads: int, waves: Waves, sizes: Sizes, config: Config, sm_count: int) -> float:
    """Steps that the waves of some heads take."""
    rounds = heads * key_tiles(sizes, config) / sm_count
    rounds = max(1.0, rounds / 2 + 0.1) if sizes.offset < sizes.seqlen_k else ceil(rounds)
    return cdiv(waves.all_steps, waves.steps) * (rounds * (waves.steps + START) + LAUNCH)


def _fitting(heads: int, sizes: Sizes, config: Config, width: int) -> Waves | None:
    """The waves of so many heads with the most steps that fit in BUDGET; None where not even the fewest do."""
    all_steps, unit = sizes.group * sizes.padded // config["block_m"], QUERIES // config["block_m"]
    keys = heads * key_tiles(sizes, config) * KEYS * config["consumers"]
    step = keys * config["block_m"] * 2
    if step * all_steps <= BUDGET:
        return Waves(heads, all_steps, all_steps)
    most = (BUDGET - keys * width * 4) // step // unit * unit
    if most < unit:
        return None if heads > 1 else Waves(heads, unit, all_steps)
    bands = cdiv(all_steps, most)
    return Waves(heads, cdiv(cdiv(all_steps, bands), unit) * unit, all_steps)


def waves_in_order(waves: Waves, sizes: Sizes) -> list[Wave]:
    """Every wave of a call: all bands of one set of heads, then of the next."""
    heads = sizes.batch * sizes.heads_kv
    return [
        Wave(head, min(waves.heads, heads - head), step, min(step + waves.steps, waves.all_steps))
        for head in range(0, heads, waves.heads)
        for step in range(0, waves.all_steps, waves.steps)
    ]


def key_tiles(sizes: Sizes, config: Config) -> int:
    """Programs of the first kernel for each head of keys."""
    return cdiv(sizes.seqlen_k, KEYS * config["consumers"])


def kept_rows(waves: Waves, sizes: Sizes, config: Config) -> int:
    """Rows of dK and of dV that are kept from wave to wave."""
    return waves.heads * key_tiles(sizes, config) * KEYS * config["consumers"] if waves.banded else 0


def space_rows(waves: Waves, sizes: Sizes, config: Config) -> int:
    """Rows, of ``block_m`` numbers, of the workspace of dS."""
    return waves.heads * key_tiles(sizes, config) * KEYS * config["consumers"] * waves.steps


def grids_of(wave: Wave, sizes: Sizes, config: Config) -> tuple[Grid, Grid]:
    """The grids of both kernels. Under a causal mask the longest programs of some heads start first."""
    together = 1
    if sizes.offset < sizes.seqlen_k:
        together = max(n for n in range(1, MOST_TOGETHER + 1) if wave.heads % n == 0)
    tiles = (wave.end_step - wave.first_step) * config["block_m"] // QUERIES
    sets = wave.heads // together
    return (together, key_tiles(sizes, config), sets), (together, tiles, sets)


def suits(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """Tiles of queries and of keys should be full."""
    return min(problem.seqlen_q, problem.seqlen_k) >= QUERIES
