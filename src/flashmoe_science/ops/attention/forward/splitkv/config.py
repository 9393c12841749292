"""What split_triton and decode_gluon serve, their tiles, the policy of splits, and the constexprs of their builds."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from flashmoe_science.hardware.gpus import GPUS, Gpu, why_no_triton
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.device.splits import MAX_ORDERED, MAX_SPLITS, Work, num_splits, partial_bytes
from flashmoe_science.ops.attention.problem import KEY_CLASS, AttentionProblem, padded_head_dim, tile_rows
from flashmoe_science.ops.launch import INTERPRETING, cdiv
from flashmoe_science.problem import DTYPE_BYTES

# The policy of splits, fitted on an H200. [n]: the section of docs/notes/serving-on-an-h200.md with what was measured:
# [1] Decoding: one launch and a merge; [2] Sequences of different lengths; [3] Equal ranges of all sequences' keys.
MIN_SPLIT_KEYS = 128  # keys of a split, at least: to merge a partial costs about as much as to attend to as many [1]
HALVE_KEYS = (8192, 4096, 2048)  # keys of a split that is halved, so that unequal sequences balance, at least; by occupancy [2]
MAX_WAVES = 8  # waves of programs up to which LPT order gains enough; MAX_ORDERED, in sequences, is in device/splits.py [2]
PAGED_KEYS = 524288  # keys in pages, of all key heads and sequences, up to which an SM is not filled with programs [2]
MAX_OCCUPANCY = 3  # programs of an SM that is filled [2]
LONE_BYTES = 100 * 1024  # of shared memory, above which one program on an SM is as fast as two [1]
MAX_STREAM_K = 1024  # sequences of which every program reads the lengths, for stream-K [3]
MIN_LENGTHS = 32  # lengths read at once: fewer made the kernel spill [3]
STREAM_K_KEYS = 262144  # keys of all key heads and sequences, from which on programs may use stream-K [3]
STREAM_K_WHOLE = 4096  # keys of a sequence that is not split, from which on they may: without stream-K it needs no merge [3]
STREAM_K_FILL = 85  # percent of the places for programs that ranges take, at least [3]
STREAM_K_FEWER = 10  # percent fewer ranges than places, at most, so that equal sequences are whole or have equal splits [3]
STREAM_K_LONGER = 1.125  # keys of the longest range over the mean of all [3]
STREAM_K_COST = 512  # keys that a program alone on an SM reads in the time that stream-K takes by itself, [3]
STREAM_K_COST_EACH = 32  # and as many more for each sequence, up to MAX_ORDERED [3]
_NAMES = ("block_m", "block_n", "num_warps", "num_stages", "num_splits")
Grid = Literal["full", "short", "few", "lone"]
Tile = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages


def supports(problem: AttentionProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    if reason := why_no_triton(device):
        return reason
    if problem.features.fp8_cache and device is not None and device.compute_capability < (8, 9):
        return f"e4m3 is converted from compute capability 8.9 on; {device.product} is {device.arch}"
    return None


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Few queries of many keys, or any mode that the other kernels do not serve."""
    group = problem.heads // problem.heads_kv
    return problem.seqlen_q * group <= 64 and problem.seqlen_k >= 512 and problem.seqlen_k >= 8 * problem.seqlen_q


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Tiles that fit the GPU's shared memory, the best guess first. ``num_splits`` of 0: chosen for each problem."""
    group = problem.heads // problem.heads_kv
    rows = tile_rows(problem.seqlen_q * group, 128)
    limit = 99 * 1024 if device is None else device.shared_per_block
    programs = problem.batch * problem.heads_kv * cdiv(problem.seqlen_q * group, rows)
    grid: Grid = "few" if device is None else grid_kind(programs, problem.seqlen_k, device.sm_count)
    if device is not None and grid == "few" and problem.batch * problem.heads * problem.seqlen_q <= device.sm_count:
        grid = "lone"
    features, widths = problem.features, (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wgmma = device is not None and device.compute_capability[0] == 9
    tiles = _tiles(rows, grid, features.page, wgmma, problem.dtype, *widths, features.fp8_cache, limit)
    return tuple(config_of(tile) for tile in tiles)


def config_of(tile: Tile) -> Config:
    """The Config of a tile, with as many splits as each problem asks for."""
    return Config(**dict(zip(_NAMES, (*tile, 0), strict=True)))


def grid_kind(programs: int, keys: int, sm_count: int) -> Grid:
    """How programs with all keys each, or with half of them, fill the GPU where an SM holds one.

    "full": nine tenths of the SMs are busy; "short": not, and a split of 128 keys for each SM takes them all; "few": neither.
    (In ``configs`` "lone": few programs, where each row of the output has an SM to itself.)
    """
    splits = max(1, sm_count // programs)
    waves = programs * splits / sm_count
    if splits <= 2 and waves >= 0.9 * math.ceil(waves):
        return "full"
    return "short" if programs * cdiv(keys, 128) <= sm_count else "few"


@lru_cache(256)
def _tiles(
    rows: int, grid: Grid, page: int, wgmma: bool, dtype: str, width: int, width_v: int, fp8: bool, limit: int
) -> tuple[Tile, ...]:
    """Tiles for ``rows`` packed rows (16 to 128), and heads padded to ``width`` and ``width_v``."""
    size = DTYPE_BYTES[dtype]
    widest = max(width, width_v)
    tiles: list[Tile]
    if size == 4:
        tiles = [(16, 16, 4, 2)]
        if widest <= 128 and rows == 16:
            tiles = [(16, 64, 4, 2), (16, 32, 4, 2), *tiles]
        elif widest <= 128:
            tiles = [*([(32, 32, 4, 2)] if widest <= 64 else []), (32, 16, 4, 2), *tiles]
    elif rows <= 32:
        # Many bytes on their way in one program an SM where that fills the GPU, all of them at once where they are few, else
        # more and smaller programs. The numbers of small pages cost a program of many keys more than it gains.
        first: list[Tile] = [(rows, 64, 2 if widest <= 128 else 4, 3), (rows, 128, 4, 3)]
        if grid == "full" and page % 64 == 0:
            first = [(rows, 64, 4, 4) if page else (rows, 128, 4, 3)]
        elif grid == "short" and page == 0:
            first = [(rows, 128, 4, 2), *first]
        elif grid == "lone" and page == 0 and rows == 16 and widest == 128 and not fp8:
            first = [(rows, 64, 4, 4), *first]
        others: list[Tile] = [(rows, 64, 4, 3), (rows, 64, 4, 4), (rows, 64, 2, 3), (rows, 32, 2, 5), (rows, 32, 4, 2)]
        tiles = [*first, *others, (16, 32, 4, 1)]
    elif widest <= 128:
        tiles = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (16, 32, 4, 2)]
        if widest == 128 and not wgmma:  # the first that fits never spills, others do of padded heads or under a diagonal
            tiles = [(64, 128, 8, 2), (32, 64, 8, 2), (64, 64, 8, 2), *tiles]
        if rows == 128:
            tiles = [tiles[0], (128, 64, 8, 3), (128, 128, 8, 3), *tiles[1:]]
    else:
        # 32 rows spill by Triton 3.9's assembler: not the first choice where 64 do not fit.
        tiles = [(64, 64, 8, 2), (64, 32, 8, 2), (16, 32, 8, 2), (16, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1)]
    size_kv = 1 if fp8 else size
    return tuple(dict.fromkeys(tile for tile in tiles if shared_bytes(tile, width, width_v, size, size_kv, tile[3]) <= limit))


def shared_bytes(tile: Tile, width: int, width_v: int, size: int, size_kv: int, buffers: int) -> int:
    """Bytes of shared memory for a tile: Q's rows, ``buffers`` tiles of K and of V, and an fp8 tile once converted. ``size``
    and ``size_kv``: bytes of an element of Q and of the cache."""
    block_m, block_n, _, _ = tile
    converted = 0 if size_kv == size else size
    return size * (block_m + 16) * max(width, width_v) + (buffers * size_kv + converted) * block_n * (width + width_v)


def span_of(problem: AttentionProblem, seqlen_q: int, config: Config) -> int | None:
    """The most keys in the windows of a tile's rows; None where a row may see all."""
    features = problem.features
    right = 0 if problem.causal else features.window_right
    if features.window_left is None or right is None or features.prefix:
        return None
    queries = min(seqlen_q, cdiv(config["block_m"], problem.heads // problem.heads_kv) + 1)
    return max(1, features.window_left + right + queries)


def work_of(heads: int, rows: int, keys: int, config: Config, span: int | None) -> Work:
    """The Work of ``rows`` packed rows of a key head, of which a tile sees ``span`` keys at the most (None: all)."""
    block_m, block_n = config["block_m"], config["block_n"]
    seen = cdiv(keys, block_n)
    if span is not None:
        seen = min(seen, cdiv(span, block_n) + 1)
    return Work(heads, cdiv(rows, block_m), max(1, seen))


def rounded_keys(keys: int) -> int:
    """``keys`` rounded up to their class: launches are bound for classes of keys."""
    return cdiv(keys, KEY_CLASS) * KEY_CLASS


def min_tiles(config: Config) -> int:
    """The least number of tiles of keys in a split."""
    return max(1, MIN_SPLIT_KEYS // config["block_n"])


class Splits(NamedTuple):
    """How the keys of sequences are shared by programs.

    ``splits`` of each sequence. ``batches``: where programs read all lengths, a power of two that holds the sequences, else 0.
    ``lpt_order``: the longest sequences start first. ``ranges``: equal ranges of all sequences' keys, of each key head, that
    programs take with stream-K, where the longest sequence has more tiles of keys than ``even_least + even_slope * tiles of
    all``; 0 where they never do.
    """

    splits: int
    batches: int = 0
    lpt_order: bool = False
    ranges: int = 0
    even_slope: float = 0.0
    even_least: float = 0.0


def lengths_differ(problem: AttentionProblem) -> bool:
    """Whether sequences see all of their keys, of which there are other numbers for each, on the device alone."""
    features = problem.features
    cached = features.lengths == "ragged" or features.page > 0
    return cached and features.window_left is None


def splits_for(work: Work, block_n: int, min_tiles: int, asked: int, sm_count: int, occupancy: int, unequal: int) -> Splits:
    """The Splits: ``asked`` if not 0, else by the work and the GPU. ``unequal``: sequences, if their lengths differ, else 1.

    Of unequal sequences the longest start first: as programs end, shorter ones take their place. In a single wave nothing
    would take the place of a short one: there long splits are halved. Where one sequence is much longer than others no order
    helps: of many keys every program may take an equal range, in one wave.
    """
    splits, slots = num_splits(work, min_tiles, asked, sm_count, occupancy), sm_count * occupancy
    if work.tiles_m > 1 or not 1 < unequal <= MAX_STREAM_K:
        return Splits(splits)
    keys = work.tiles_n * block_n
    long = keys >= splits * HALVE_KEYS[occupancy - 1 if splits > 1 else 0]
    if not asked and unequal <= MAX_ORDERED and work.heads * splits <= slots and long:
        splits = min(2 * splits, MAX_SPLITS)
    lpt_order = unequal <= MAX_ORDERED and slots < work.heads * splits <= MAX_WAVES * slots
    batches, heads_kv = max(MIN_LENGTHS, 1 << (unequal - 1).bit_length()), work.heads // unequal
    ranges = ranges_of(unequal, slots // heads_kv)
    fills = ranges > 1 and 100 * ranges * heads_kv >= STREAM_K_FILL * slots
    fits = ranges * unequal * (work.tiles_n + min_tiles + 1) < 2**31
    many = work.heads * keys >= STREAM_K_KEYS and (splits > 1 or keys >= STREAM_K_WHOLE)
    if asked or not (fills and fits and many):
        return Splits(splits, batches if lpt_order else 0, lpt_order)
    # Where a sequence's splits take longer than the longest range and what stream-K costs.
    cost = STREAM_K_COST + STREAM_K_COST_EACH * min(unequal, MAX_ORDERED)
    slope = STREAM_K_LONGER * splits * heads_kv / slots
    return Splits(splits, batches, lpt_order, ranges, slope, splits * cost / (block_n * occupancy))


@lru_cache(256)
def ranges_of(sequences: int, slots: int) -> int:
    """Ranges of the keys of each key head: the ``slots`` that run at once, or a few fewer by which equal sequences are whole
    or have equal splits."""
    for ranges in range(slots, slots - slots * STREAM_K_FEWER // 100 - 1, -1):
        if ranges and (sequences % ranges == 0 or ranges % sequences == 0):
            return ranges
    return slots


def main_grid(chosen: Splits, programs: int, batch: int) -> tuple[int, int, int]:
    """The grid of the main kernel: a program for each tile of rows and key head of ``batch`` sequences and each of their
    splits, in one dimension where programs read all lengths; and enough for ranges."""
    if chosen.batches:
        return (programs // batch * max(chosen.ranges, batch * chosen.splits), 1, 1)
    return (programs, chosen.splits, 1)


def slots_of(chosen: Splits, batch: int) -> int:
    """Slots of partials of each row: of its own splits or, with stream-K, of those of all sequences."""
    return max(batch * chosen.splits, batch + chosen.ranges) if chosen.ranges else chosen.splits


def splits_in(problem: AttentionProblem, config: Config, sm_count: int) -> tuple[Work, Splits]:
    """The Work and the Splits of a problem without tensors."""
    rows = problem.seqlen_q * (problem.heads // problem.heads_kv)
    span = span_of(problem, problem.seqlen_q, config)
    work = work_of(problem.batch * problem.heads_kv, rows, rounded_keys(problem.seqlen_k), config, span)
    unequal, asked = problem.batch if lengths_differ(problem) else 1, config["num_splits"]
    programs = occupancy(problem, config, work)
    return work, splits_for(work, config["block_n"], min_tiles(config), asked, sm_count, programs, unequal)


def occupancy(problem: AttentionProblem, config: Config, work: Work) -> int:
    """Programs that an SM is meant to hold at once: two, if they are small; of many keys in pages, as many as it does hold."""
    tile = (config["block_m"], config["block_n"], config["num_warps"], config["num_stages"])
    widths = (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    size = DTYPE_BYTES[problem.dtype]
    # The pipeline holds a tile less than it has stages, of the smaller products at least: a guess may count on it.
    buffers = max(1, config["num_stages"] - 1)
    shared = shared_bytes(tile, *widths, size, 1 if problem.features.fp8_cache else size, buffers)
    if config["block_m"] > 64:
        return 1
    # Waves of programs are counted by what an SM of sm_90 holds: 228 KiB, of which each program takes 1 KiB more than it asks.
    if problem.features.page and work.heads * work.tiles_n * config["block_n"] > PAGED_KEYS:
        return max(1, min(MAX_OCCUPANCY, 228 * 1024 // (shared + 1024)))
    return 2 if shared <= LONE_BYTES else 1


def partials_of(chosen: Splits, batch: int, rows: int, width_v: int) -> int:
    """Bytes of the partials of ``rows`` rows of ``batch`` sequences. With stream-K, sequences share the rows of a key head, and
    each has its first slot and its number of splits."""
    if not chosen.ranges:
        return partial_bytes(rows, chosen.splits, width_v)
    return partial_bytes(rows // batch, slots_of(chosen, batch), width_v) + 8 * batch


def workspace(problem: AttentionProblem, config: Config) -> int:
    """Bytes of the partials, on the GPU that takes the most."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    counts = {gpu.sm_count for gpu in GPUS.values()}
    chosen = [splits_in(problem, config, count)[1] for count in counts]
    return max(partials_of(one, problem.batch, rows, problem.head_dim_v) for one in chosen)


class OfNew(NamedTuple):
    """What a launch is bound to of new rows: three strides of K and of V, sizes, and what a build is specialised on."""

    strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    sizes: tuple[int, ...] = (0, 0, 0, 0)  # new rows, caches or pages, positions that the tables have, their stride
    constexprs: tuple[int, ...] = (0, 0, 0, 0)  # BLOCK_NEW, HALF, INTERLEAVED, MOVING
    pointers: tuple[torch.dtype | None, ...] = (None,) * 5  # of new K and V, cos, sin, and the lengths that rotate


NO_NEW = OfNew()


class Variant(NamedTuple):
    """What a build is specialised on by the sizes of a call."""

    group: int
    one_tile: bool
    split: bool
    stream_k: bool
    lpt_order: bool
    batches: int
    right: bool
    ends: bool
    wide: bool
    compensated: bool
    unit: int
    new: tuple[int, ...]
    new_pointers: tuple[torch.dtype | None, ...]
    strides: Hashable


def constexprs_of(
    problem: AttentionProblem, config: Config, variant: Variant, scale_first: bool, early: bool
) -> dict[str, Any]:
    """The main kernel's constexprs, in its order."""
    features = problem.features
    return {
        "GROUP": variant.group,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"],
        # The compiler counts a load of page numbers as a stage of its own, before that of the keys.
        "NUM_STAGES": 2 * config["num_stages"] - 1 if features.page else config["num_stages"],
        "MIN_TILES": min_tiles(config),
        "ONE_TILE": variant.one_tile,
        "SPLIT": variant.split,
        "STREAM_K": variant.stream_k,
        "LPT_ORDER": variant.lpt_order,
        "BATCHES": variant.batches,
        "PAGE": features.page,
        "LEFT": features.window_left is not None,
        "RIGHT": variant.right,
        "TOPLEFT": problem.mask == "causal-topleft",
        "SOFTCAP": bool(features.softcap),
        "BIAS": features.bias,
        "ENDS": variant.ends,
        "ALWAYS": config["block_m"] <= 32,
        "WIDE": variant.wide,
        "UNIT": variant.unit,
        "COMPENSATED": variant.compensated,
        "SCALE_FIRST": scale_first or bool(features.softcap) or features.bias in ("alibi", "additive") or features.fp8_cache,
        "PRECISION": "bf16x6" if problem.dtype == "fp32" else "tf32",
        "INTERPRET": INTERPRETING,
        "EARLY_START": early,
        **dict(zip(("BLOCK_NEW", "HALF", "INTERLEAVED", "MOVING"), variant.new, strict=True)),
    }
