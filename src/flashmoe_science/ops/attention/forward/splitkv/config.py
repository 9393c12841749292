"""What split_triton.py decides on the host: what it serves, its tiles, into how many pieces keys are split, and its builds."""

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

MOST_ROUNDS = 8  # of programs that take turns: beyond, an order gains too little
MOST_RANGED = 1024  # sequences of which every program reads the lengths
LONG_PIECE = 4096  # keys of a piece that may be cut in two so that unequal sequences balance, of programs that share an SM
LONG_ALONE = 8192  # the same of a program alone on an SM, which reads faster, and of a sequence that was not to be split
LONG_THIRD = 2048  # the same of programs that are three on an SM
RANGED_KEYS = 262144  # of all key heads and sequences, from which on programs may take equal ranges of all sequences' keys
RANGED_WHOLE = 4096  # keys of a sequence that is not split, from which on: without ranges it needs no merge
RANGED_COST = 512  # keys that a program alone on an SM reads in the time that ranges take beside attending to their keys,
RANGED_EACH = 32  # and as many more for each of the sequences, up to MAX_ORDERED
PAGED_KEYS = 524288  # keys in pages, of all key heads and sequences, up to which an SM is not filled with programs
MOST_RESIDENT = 3  # programs on an SM where it is
FEWEST_KEYS = 128  # of a split: merging a partial costs about as much as attending to as many
FAR = 2**30  # a window that hides nothing; positions plus this still fit 32 bits
_NAMES = ("block_m", "block_n", "num_warps", "num_stages", "num_splits")
Grid = Literal["full", "short", "few", "lone"]
Tile = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages


def supports(problem: AttentionProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    if reason := why_no_triton(device):
        return reason
    if problem.modes.fp8_cache and device is not None and device.compute_capability < (8, 9):
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
    modes, widths = problem.modes, (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wgmma = device is not None and device.compute_capability[0] == 9
    tiles = _tiles(rows, grid, modes.page, wgmma, problem.dtype, *widths, modes.fp8_cache, limit)
    return tuple(config_of(tile) for tile in tiles)


def config_of(tile: Tile) -> Config:
    """The Config of a tile, with as many splits as each problem asks for."""
    return Config(**dict(zip(_NAMES, (*tile, 0), strict=True)))


def grid_kind(programs: int, keys: int, sm_count: int) -> Grid:
    """How programs with all keys each, or with half of them, fill the GPU where an SM holds one.

    "full": nine tenths of the SMs are busy; "short": not, and a split of 128 keys for each SM takes them all; "few": neither.
    (``configs`` says "lone" of few programs where each row of the output has an SM to itself.)
    """
    splits = max(1, sm_count // programs)
    rounds = programs * splits / sm_count
    if splits <= 2 and rounds >= 0.9 * math.ceil(rounds):
        return "full"
    return "short" if programs * cdiv(keys, 128) <= sm_count else "few"


@lru_cache(256)
def _tiles(
    rows: int, grid: Grid, page: int, wgmma: bool, dtype: str, width: int, width_v: int, fp8: bool, limit: int
) -> tuple[Tile, ...]:
    """Tiles for that many packed rows (16 to 128), and heads padded to ``width`` and ``width_v``."""
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
    held = 1 if fp8 else size
    return tuple(dict.fromkeys(tile for tile in tiles if shared_bytes(tile, width, width_v, size, held, tile[3]) <= limit))


def shared_bytes(tile: Tile, width: int, width_v: int, size: int, held: int, buffers: int) -> int:
    """Shared memory that such a tile takes: Q's tile, ``buffers`` tiles of K and of V, and an fp8 tile once converted."""
    block_m, block_n, _, _ = tile
    converted = 0 if held == size else size
    return size * (block_m + 16) * max(width, width_v) + (buffers * held + converted) * block_n * (width + width_v)


def span_of(problem: AttentionProblem, seqlen_q: int, config: Config) -> int | None:
    """The most keys that a tile of rows sees of those before and after it in a window; None where it may see all."""
    modes = problem.modes
    right = 0 if problem.causal else modes.window_right
    if modes.window_left is None or right is None or modes.prefix:
        return None
    queries = min(seqlen_q, cdiv(config["block_m"], problem.heads // problem.heads_kv) + 1)
    return max(1, modes.window_left + right + queries)


def work_of(heads: int, rows: int, keys: int, config: Config, span: int | None) -> Work:
    """The Work of ``rows`` packed rows a key head that each see ``span`` keys at the most (None: all)."""
    block_m, block_n = config["block_m"], config["block_n"]
    seen = cdiv(keys, block_n)
    if span is not None:
        seen = min(seen, cdiv(span, block_n) + 1)
    return Work(heads, cdiv(rows, block_m), max(1, seen))


def rounded_keys(keys: int) -> int:
    """The most keys of the class that decides in place of ``keys``."""
    return cdiv(keys, KEY_CLASS) * KEY_CLASS


def min_tiles(config: Config) -> int:
    """The fewest tiles of keys of a split."""
    return max(1, FEWEST_KEYS // config["block_n"])


class Splits(NamedTuple):
    """How the keys of sequences are shared by programs.

    ``pieces`` of each sequence. ``batches``: where programs read all lengths, a power of two that holds the sequences, else 0.
    ``ordered``: the longest sequences start first. ``ranges``: equal ranges of all sequences' keys, of each key head, that
    programs take instead where the longest sequence has more tiles of keys than ``even_least + even_slope * tiles of all``; 0
    where they never do.
    """

    pieces: int
    batches: int = 0
    ordered: bool = False
    ranges: int = 0
    even_slope: float = 0.0
    even_least: float = 0.0


def uneven_of(problem: AttentionProblem) -> bool:
    """Whether sequences have lengths of their own that may differ and that the device alone knows, and see all of them."""
    modes = problem.modes
    cached = modes.lengths == "ragged" or modes.page > 0
    return cached and modes.window_left is None


def splits_for(work: Work, block_n: int, least_tiles: int, asked: int, sm_count: int, resident: int, uneven: int) -> Splits:
    """The Splits of ``asked`` pieces if not 0, else as the work and the GPU suggest. ``uneven``: sequences, if their lengths
    are unequal, else 1.

    Of unequal sequences the longest start first: as programs end, shorter ones take their place. In a single round nothing
    would take the place of a short one: there long pieces are halved. Where one sequence is much longer than others no order
    helps: of many keys every program may take an equal range, at one go.
    """
    pieces, slots = num_splits(work, least_tiles, asked, sm_count, resident), sm_count * resident
    if work.tiles_m > 1 or not 1 < uneven <= MOST_RANGED:
        return Splits(pieces)
    long = work.tiles_n * block_n >= pieces * ((LONG_ALONE, LONG_PIECE, LONG_THIRD)[resident - 1] if pieces > 1 else LONG_ALONE)
    if not asked and uneven <= MAX_ORDERED and work.heads * pieces <= slots and long:
        pieces = min(2 * pieces, MAX_SPLITS)
    ordered = uneven <= MAX_ORDERED and slots < work.heads * pieces <= MOST_ROUNDS * slots
    batches = max(32, 1 << (uneven - 1).bit_length())  # fewer lengths at once made the kernel spill
    keys, heads_kv = work.heads * work.tiles_n * block_n, work.heads // uneven
    ranges = ranges_of(uneven, slots // heads_kv)
    fills = ranges > 1 and 20 * ranges * heads_kv >= 17 * slots and ranges * uneven * (work.tiles_n + least_tiles + 1) < 2**31
    if asked or not fills or keys < RANGED_KEYS or (pieces == 1 and work.tiles_n * block_n < RANGED_WHOLE):
        return Splits(pieces, batches if ordered else 0, ordered)
    # The longest piece of a sequence takes longer than ranges do: those are an eighth more than the keys of a program in the
    # mean, and what they cost.
    cost = RANGED_COST + RANGED_EACH * min(uneven, MAX_ORDERED)
    return Splits(pieces, batches, ordered, ranges, 1.125 * pieces * heads_kv / slots, pieces * cost / (block_n * resident))


@lru_cache(256)
def ranges_of(sequences: int, most: int) -> int:
    """Ranges of the keys of each key head: the ``most`` that run at once, or a tenth fewer by which equal sequences are whole
    or have equal pieces."""
    for ranges in range(most, most - most // 10 - 1, -1):
        if ranges and (sequences % ranges == 0 or ranges % sequences == 0):
            return ranges
    return most


def main_grid(chosen: Splits, programs: int, batch: int) -> tuple[int, int, int]:
    """The grid of the main kernel: a program for each tile of rows and key head of ``batch`` sequences and each piece of those,
    in one dimension where programs read all lengths; and enough for ranges."""
    if chosen.batches:
        return (programs // batch * max(chosen.ranges, batch * chosen.pieces), 1, 1)
    return (programs, chosen.pieces, 1)


def places_of(chosen: Splits, batch: int) -> int:
    """Places of partials of each row: of its own pieces or, where programs may take ranges, of those of all sequences."""
    return max(batch * chosen.pieces, batch + chosen.ranges) if chosen.ranges else chosen.pieces


def splits_in(problem: AttentionProblem, config: Config, sm_count: int) -> tuple[Work, Splits]:
    """The Work and the Splits of a problem as its text says it."""
    rows = problem.seqlen_q * (problem.heads // problem.heads_kv)
    span = span_of(problem, problem.seqlen_q, config)
    work = work_of(problem.batch * problem.heads_kv, rows, rounded_keys(problem.seqlen_k), config, span)
    uneven = problem.batch if uneven_of(problem) else 1
    held = resident(problem, config, work)
    return work, splits_for(work, config["block_n"], min_tiles(config), config["num_splits"], sm_count, held, uneven)


def resident(problem: AttentionProblem, config: Config, work: Work) -> int:
    """Programs that an SM is meant to hold at once: two, if they are small; of many keys in pages, as many as it does hold."""
    tile = (config["block_m"], config["block_n"], config["num_warps"], config["num_stages"])
    widths = (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    size = DTYPE_BYTES[problem.dtype]
    # The pipeline holds a tile less than it has stages, of the smaller products at least: a guess may count on it.
    buffers = max(1, config["num_stages"] - 1)
    shared = shared_bytes(tile, *widths, size, 1 if problem.modes.fp8_cache else size, buffers)
    if config["block_m"] > 64:
        return 1
    # Rounds of programs are counted by what an SM of sm_90 holds: 228 KiB, of which each program takes 1 KiB more than it asks.
    if problem.modes.page and work.heads * work.tiles_n * config["block_n"] > PAGED_KEYS:
        return max(1, min(MOST_RESIDENT, 228 * 1024 // (shared + 1024)))
    # One program with so many bytes on their way is as fast as two.
    return 2 if shared <= 100 * 1024 else 1


def partials_of(chosen: Splits, batch: int, rows: int, width_v: int) -> int:
    """Bytes of the partials of ``rows`` rows of ``batch`` sequences. Where programs may take ranges, sequences share the rows
    of a key head, and each has two numbers that say which places are its own."""
    if not chosen.ranges:
        return partial_bytes(rows, chosen.pieces, width_v)
    return partial_bytes(rows // batch, places_of(chosen, batch), width_v) + 8 * batch


def workspace(problem: AttentionProblem, config: Config) -> int:
    """Bytes of the partials, on the GPU that takes the most."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    counts = {gpu.sm_count for gpu in GPUS.values()}
    chosen = [splits_in(problem, config, count)[1] for count in counts]
    return max(partials_of(one, problem.batch, rows, problem.head_dim_v) for one in chosen)


class OfNew(NamedTuple):
    """What a launch is bound to of an Append: three strides of K and of V, sizes, and what a build is specialised on."""

    strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    sizes: tuple[int, ...] = (0, 0, 0, 0)  # new rows, caches or pages, positions that the tables have, their stride
    constexprs: tuple[int, ...] = (0, 0, 0, 0)  # BLOCK_NEW, HALF, INTERLEAVED, MOVING
    pointers: tuple[torch.dtype | None, ...] = (None,) * 5  # of new K and V, cos, sin, and the lengths that rotate


NO_NEW = OfNew()


class Variant(NamedTuple):
    """What a build is specialised on beside its plan, and sizes decide."""

    group: int
    one_tile: bool
    split: bool
    ranged: bool
    ordered: bool
    batches: int
    right: bool
    ends: bool
    wide: bool
    compensated: bool
    unit: int = 1
    new: tuple[int, ...] = NO_NEW.constexprs
    new_pointers: tuple[torch.dtype | None, ...] = NO_NEW.pointers
    strides: Hashable = None


def constexprs_of(
    problem: AttentionProblem, config: Config, variant: Variant, scale_first: bool, early: bool
) -> dict[str, Any]:
    modes = problem.modes
    return {
        "GROUP": variant.group,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"],
        # The compiler counts a load of page numbers as a stage beside that of the keys which they lead to.
        "NUM_STAGES": 2 * config["num_stages"] - 1 if modes.page else config["num_stages"],
        "MIN_TILES": min_tiles(config),
        "ONE_TILE": variant.one_tile,
        "SPLIT": variant.split,
        "STREAM_K": variant.ranged,
        "LPT_ORDER": variant.ordered,
        "BATCHES": variant.batches,
        "PAGE": modes.page,
        "LEFT": modes.window_left is not None,
        "RIGHT": variant.right,
        "TOPLEFT": problem.mask == "causal-topleft",
        "SOFTCAP": bool(modes.softcap),
        "BIAS": modes.bias,
        "ENDS": variant.ends,
        "ALWAYS": config["block_m"] <= 32,
        "WIDE": variant.wide,
        "UNIT": variant.unit,
        "COMPENSATED": variant.compensated,
        "SCALE_FIRST": scale_first or bool(modes.softcap) or modes.bias in ("alibi", "additive") or modes.fp8_cache,
        "PRECISION": "bf16x6" if problem.dtype == "fp32" else "tf32",
        "INTERPRET": INTERPRETING,
        "EARLY_START": early,
        **dict(zip(("BLOCK_NEW", "HALF", "INTERLEAVED", "MOVING"), variant.new, strict=True)),
    }


def right_of(problem: AttentionProblem, seqlen_q: int) -> int | None:
    """How far right of its diagonal a query sees; None for no limit, as that of one query that sees the last key."""
    right = problem.modes.window_right
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    if right is not None and right >= 0 and seqlen_q == 1 and problem.mask != "causal-topleft":
        return None
    return right if right is None else min(right, FAR)
