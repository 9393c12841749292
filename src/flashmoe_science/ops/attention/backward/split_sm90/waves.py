"""The waves of bwd_gluon_sm90: what part of dS is in the workspace at a time, and what is kept from one to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashmoe_science.ops.attention.backward.sizes import QUERIES, Sizes
from flashmoe_science.ops.launch import Grid, cdiv

BUDGET = 2**30  # bytes of the workspace: it does not depend on the memory that is free, nor the bits on it
MOST_HEADS = 2**15  # of a wave: the last number of a grid is less than 2^16
MOST_TOGETHER = 8  # heads whose tiles go out in turns, so that Q, K, V and dO of them stay in the L2 cache
# The time of a wave is counted in steps of a program of the first kernel, by what was measured on an H100: what a program takes
# besides its steps, what a launch takes, and the bytes that a processor's share of the memory moves in a step.
_START, _LAUNCH, _STEP_BYTES = 5.6, 2.5, 43 << 10
_HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # that are tried, and all of them
_BANDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of keys
_ROUNDS = 8  # of programs, after which a rest is little of the whole
_MORE = 1.5  # times as many waves as are needed, above which none is tried


class Waves(NamedTuple):
    """A wave has ``heads`` heads of keys, ``steps`` tiles of queries, of one head after another that shares a key head, and
    ``tiles`` tiles of keys."""

    heads: int
    steps: int
    tiles: int


class Wave(NamedTuple):
    """The place of a wave, in units of Waves. Some query sees the first ``seen`` of its ``tiles``."""

    first_head: int
    heads: int
    first_step: int
    steps: int
    first_tile: int
    tiles: int
    seen: int


class Space(NamedTuple):
    """Numbers in the workspace: of dS, and in fp32 of dK, dV and dQ that are kept from wave to wave, 0 where none is."""

    ds: int
    dk: int
    dv: int
    dq: int

    @property
    def bytes(self) -> int:
        return 2 * self.ds + 4 * (self.dk + self.dv + self.dq)


def space_of(waves: Waves, sizes: Sizes) -> Space:
    keys = waves.heads * waves.tiles * sizes.block_n
    kept = keys if waves.steps < sizes.steps else 0
    queries = waves.heads * sizes.queries(sizes.steps) if waves.tiles < sizes.tiles else 0
    return Space(keys * waves.steps * sizes.block_m, kept * sizes.of_qk, kept * sizes.of_v, queries * sizes.of_qk)


def waves_of(sizes: Sizes, sm_count: int) -> Waves:
    """The waves that are the quickest by a count of steps, of those whose workspace is within BUDGET."""
    tried = {waves: _count(waves, sizes) for waves in _tried(sizes)} or {Waves(1, sizes.unit, 1): 1}
    few = [waves for waves, count in tried.items() if count <= _MORE * min(tried.values())]
    return min(few, key=lambda waves: _time(waves, sizes, sm_count))


def waves_without_ds(sizes: Sizes) -> Waves:
    """As few as grids allow: nothing of a wave is kept."""
    return Waves(min(sizes.batch * sizes.heads_kv, MOST_HEADS), sizes.steps, sizes.tiles)


def _count(waves: Waves, sizes: Sizes) -> int:
    """How many there are, without a mask."""
    heads = sizes.batch * sizes.heads_kv
    return cdiv(heads, waves.heads) * cdiv(sizes.tiles, waves.tiles) * cdiv(sizes.steps, waves.steps)


def _tried(sizes: Sizes) -> Iterator[Waves]:
    """Waves that fit, with as many steps as they may have."""
    heads, unit = sizes.batch * sizes.heads_kv, sizes.unit
    for count in sorted({heads, *_HEADS}):
        for tiles in sorted({cdiv(sizes.tiles, bands) for bands in _BANDS}, reverse=True):
            waves = Waves(count, sizes.steps, tiles)
            if space_of(waves, sizes).bytes > BUDGET:
                least = space_of(waves._replace(steps=unit), sizes)
                most, units = (BUDGET - least.bytes) // (2 * least.ds) + 1, sizes.steps // unit
                if most < 1:
                    continue
                waves = waves._replace(steps=cdiv(units, cdiv(units, most)) * unit)
            if count <= heads:
                yield waves
            if waves.steps == sizes.steps:
                break


def _time(waves: Waves, sizes: Sizes, sm_count: int) -> float:
    """Steps that all waves take."""
    whole, rest = divmod(sizes.batch * sizes.heads_kv, waves.heads)
    time = whole * sum(_time_of(one, waves, sizes, sm_count) for one in _waves_of_set(0, waves.heads, waves, sizes))
    return time + sum(_time_of(one, waves, sizes, sm_count) for one in _waves_of_set(0, rest, waves, sizes) if rest)


def _time_of(wave: Wave, waves: Waves, sizes: Sizes, sm_count: int) -> float:
    """Steps that a wave takes, both kernels'. Sums that are kept are read and written."""
    products, share = wave.heads * sizes.queries(wave.steps) // QUERIES, _share(wave, sizes)
    kept = 8 * sizes.block_n * (sizes.of_qk + sizes.of_v) if waves.steps < sizes.steps else 0
    of_keys = _time_of_keys(wave, sizes, sm_count, share, _START + kept / _STEP_BYTES)
    kept = 8 * QUERIES * sizes.of_qk if waves.tiles < sizes.tiles else 0
    keys = max(wave.seen, 1) * sizes.block_n
    moved = 2 * QUERIES * (min(keys, sizes.band * sizes.block_m) if sizes.band else keys) + kept
    of_product = max(1.0, products / sm_count * share + 0.1) * moved / _STEP_BYTES  # by memory: those that are few are faster
    return of_keys + of_product + 2 * _LAUNCH


def _time_of_keys(wave: Wave, sizes: Sizes, sm_count: int, share: float, besides: float) -> float:
    """Steps of the first kernel, whose programs start by length, the longest first, and take ``besides`` more than their steps.
    It takes the mean over SMs and a tenth of a whole program; and no less than n + 1 times the first program of round n, as the
    SM that runs it has run n before, none of them shorter."""
    programs = wave.heads * max(wave.seen, 1)
    rounds = cdiv(programs, sm_count)
    if share == 1.0:
        return rounds * (wave.steps + besides)
    firsts = (n * sm_count // wave.heads for n in range(min(rounds, _ROUNDS)))
    least = max((n + 1) * (_steps_of(tile, wave, sizes) + besides) for n, tile in enumerate(firsts))
    mean = programs / sm_count * (share * wave.steps + besides) + 0.1 * (wave.steps + besides)
    return max(least, mean) if rounds > 1 else least


def _steps_of(tile: int, wave: Wave, sizes: Sizes) -> int:
    """Steps of a wave's program of a tile of keys: those whose last query sees the first of the keys."""
    hidden = max((wave.first_tile + tile) * sizes.block_n - sizes.offset, 0) // QUERIES * (QUERIES // sizes.block_m)
    return sum(max(0, first + steps - max(first, hidden)) for first, steps in _parts(wave, sizes))


def _parts(wave: Wave, sizes: Sizes) -> Iterator[tuple[int, int]]:
    """The first tile of queries and their number, of each head of the group that the wave has steps of."""
    of_head, step, end = sizes.padded // sizes.block_m, wave.first_step, wave.first_step + wave.steps
    while step < end:
        steps = min(of_head - step % of_head, end - step)
        yield step % of_head, steps
        step += steps


def _share(wave: Wave, sizes: Sizes) -> float:
    """The share of a wave's scores that are not behind the diagonal; 1 in a band."""
    if sizes.band:
        return 1.0
    keys = max(wave.seen, 1) * sizes.block_n
    before = sizes.offset - wave.first_tile * sizes.block_n  # of a band's keys those that the query 0 sees, less one
    seen = 0.0
    for first, steps in _parts(wave, sizes):
        low = before + first * sizes.block_m
        seen += _below(low + steps * sizes.block_m, keys) - _below(low, keys)
    return seen / (wave.steps * sizes.block_m * keys)


def _below(queries: int, keys: int) -> float:
    """Scores of that many queries, of which the first sees one of the keys and each other sees one more than the one before."""
    inside = min(max(queries, 0), keys)
    return inside * inside / 2 + keys * (max(queries, 0) - inside)


def waves_in_order(waves: Waves, sizes: Sizes) -> list[Wave]:
    """Every wave of a call, of some heads after others."""
    heads = sizes.batch * sizes.heads_kv
    sets = ((head, min(waves.heads, heads - head)) for head in range(0, heads, waves.heads))
    return [wave for head, count in sets for wave in _waves_of_set(head, count, waves, sizes)]


def _waves_of_set(head: int, count: int, waves: Waves, sizes: Sizes) -> Iterator[Wave]:
    """The waves of some heads: for each band of keys, the bands of queries in order. Where no query sees a key there is none,
    unless results must be written."""
    for tile in range(0, sizes.tiles, waves.tiles):
        tiles = min(waves.tiles, sizes.tiles - tile)
        for step in range(0, sizes.steps, waves.steps):
            end = min(step + waves.steps, sizes.steps)
            keys = max(0, min(sizes.seqlen_k, _last_query(step, end, sizes) + 1 + sizes.offset))
            seen = tiles if sizes.band or end == sizes.steps else max(0, min(tiles, cdiv(keys, sizes.block_n) - tile))
            if seen or tile == 0:
                yield Wave(head, count, step, end - step, tile, tiles, seen)


def _last_query(step: int, end: int, sizes: Sizes) -> int:
    """The last query of steps of one head after another, by its place in its head."""
    of_head = sizes.padded // sizes.block_m
    whole = step // of_head < end // of_head
    return (of_head if whole else end % of_head) * sizes.block_m - 1


def grids_of(wave: Wave, sizes: Sizes) -> tuple[Grid, Grid]:
    """The grids of both kernels. Under a causal mask the longest programs of some heads start first."""
    together = 1
    if sizes.offset < sizes.seqlen_k:
        together = max(n for n in range(1, MOST_TOGETHER + 1) if wave.heads % n == 0)
    sets = wave.heads // together
    return (together, max(wave.seen, 1), sets), (together, sizes.queries(wave.steps) // QUERIES, sets)
