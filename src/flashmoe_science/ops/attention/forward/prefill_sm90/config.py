"""What fwd_gluon_sm90 serves, and the shapes of its programs by problem and GPU, the best guess first."""

from __future__ import annotations

from math import ceil

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.kernel import ProblemShape
from flashmoe_science.ops.attention.device.bias import EXCHANGE_BYTES
from flashmoe_science.ops.attention.device.sm90 import ROWS, SHARED_BYTES
from flashmoe_science.ops.attention.device.tma import fills_tiles, why_not_on_sm90
from flashmoe_science.ops.attention.forward.prefill_sm90.variant import (
    chunk_columns,
    heads_of_tile,
    is_packed,
    out_fits_query,
    tiles_of_head,
)
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.ops.attention.problem.features import PLAIN, unsupported
from flashmoe_science.ops.launch import cdiv

SERVED = ("window", "softcap", "sinks", "alibi", "boolmask", "bias", "prefix", "packed", "page")
FULL_HEAD = 512  # queries
# Keys, and tiles for each processor, from which on three consumers are the fastest for causal heads of up to 64 columns.
MANY_KEYS, MANY_ROUNDS = 3072, 8
# By how much a program of more consumers is faster a row than one of fewer, where both have work for the whole GPU: if the rows
# of the busiest processor differ by more, they decide.
DUO_GAIN, TRIO_GAIN, RAGGED_GAIN, PAIR_GAIN, CAUSAL_PAIR_GAIN = 1.03, 1.1, 1.15, 1.3, 1.5
MANY_EACH = 4  # times as many keys of the longest sequence as queries, from which on more stages are worth their memory
SOME_KEYS = 768  # in a window, up to which small tiles are faster
# The speed of other tiles by that of two consumers of 128 keys where both compute as much (docs/notes/fwd-gluon-sm90.md): of
# three consumers of 64 keys, full and causal, to a head's width; and of one, causal, at a width.
TRIO_GAINS, LONE_GAINS = {80: (1.04, 1.05), 96: (1.01, 1.15), 128: (1.01, 1.1)}, {96: 0.94, 128: 0.92}
DIAGONAL_KEYS, LONE_KEYS = 64, 256  # keys that a diagonal costs a tile of queries; up to which one consumer is no faster


def supports(problem: AttentionProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    reason = why_not_on_sm90(problem, device) or unsupported(problem.features, SERVED)
    if reason is None and problem.features.prefix and problem.features.window:
        return "it does not serve a prefix and a window"
    return reason


Shape = dict[str, int]  # a config without what ``_scheduled`` adds


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Shapes of the program by head dimension and length, the best guess first (docs/notes/fwd-gluon-sm90.md)."""
    assert device is not None
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    if is_packed(problem):
        shapes = _packed_shapes(problem, width, device)
    elif problem.features.window and width <= 128:
        shapes = _windowed_shapes(problem, width)
    elif width <= 64:
        shapes = _narrow_shapes(problem, device)
    elif width <= 128:
        shapes = _middle_shapes(problem, device)
    else:
        shapes = _wide_shapes(problem)
    if problem.features.bias != "none":
        shapes = _biased_shapes(problem, shapes)
    return tuple(_scheduled(problem, device, shape) for shape in shapes)


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """A consumer's 64 rows should be full, and the tiles fill the GPU or be many a head; below that the portable kernel's thin
    tiles win."""
    return fills_tiles(problem, gpu) or problem.seqlen_q >= FULL_HEAD


def _narrow_shapes(problem: AttentionProblem, gpu: Gpu) -> tuple[Shape, ...]:
    lone, thin = shape_of(1, 128, 2, 2, occupancy=2), shape_of(1, 64, 2, 3, occupancy=3)
    duo, trio = shape_of(2, 128, 2, 2), shape_of(3, 128, 2, 2)
    many = problem.seqlen_k >= MANY_KEYS and _tiles_each(problem, gpu, trio) >= MANY_ROUNDS
    if _ragged(problem):
        if problem.causal:
            return (trio, duo) if many or problem.seqlen_k < 1024 else (duo, trio)
        return (duo, trio) if _rows_ratio(problem, gpu, trio, duo) > RAGGED_GAIN else (trio, duo)
    if problem.causal and many:
        return trio, lone, thin
    if problem.causal:
        return (lone, thin) if problem.seqlen_k >= 2048 else (thin, lone)
    first, medium = lone, FULL_HEAD <= problem.seqlen_q <= 2 * FULL_HEAD and problem.features.bias == "none"
    if problem.seqlen_q >= FULL_HEAD and _rows_ratio(problem, gpu, trio, lone) <= TRIO_GAIN:
        first = trio
    elif medium and _rows_ratio(problem, gpu, duo, lone) <= DUO_GAIN:
        first = duo
    return first, *(shape for shape in (lone, duo, trio, thin) if shape is not first)


def _middle_shapes(problem: AttentionProblem, gpu: Gpu) -> tuple[Shape, ...]:
    pair, lone = _pair(problem), _lone(problem)
    same, causal, keys = head_parts(problem.head_dim) == head_parts(problem.head_dim_v), problem.causal, problem.seqlen_k
    few = _rows_ratio(problem, gpu, pair, lone) > (CAUSAL_PAIR_GAIN if causal else PAIR_GAIN)
    ragged = problem.head_dim % 32 or problem.head_dim_v % 32  # rows of no whole 64 bytes: copies cost more
    if same and problem.features == PLAIN:
        return (lone, FITTED) if few and not ragged else (FITTED,)
    if ragged:
        return pair, lone
    few |= keys < ((1600 if causal else 1024) if same and problem.head_dim == 96 else 768 * causal)
    return (lone, pair) if few else (pair, lone)


def _pair(problem: AttentionProblem) -> Shape:
    narrow = max(problem.head_dim, problem.head_dim_v) <= 80 and min(problem.head_dim, problem.head_dim_v) > 64
    return shape_of(2, 128, 2, 2, stages_v=3 if narrow else 2)


def _lone(problem: AttentionProblem) -> Shape:
    if head_parts(problem.head_dim) == head_parts(problem.head_dim_v) == (64, 32):
        return shape_of(1, 64, 1, 2, occupancy=3, own_out=0)
    return shape_of(1, 64, 2, 2, occupancy=2)


def _trio(problem: AttentionProblem) -> Shape:
    if problem.head_dim <= 96:
        return shape_of(3, 64, 2, 3)
    # Wider, a third stage and memory of its own for O do not both fit.
    return shape_of(3, 64, 2, 3, own_out=0) if problem.causal else shape_of(3, 64, 2, 2)


def fitted(problem: AttentionProblem, sizes: AttentionProblem | ProblemShape, config: Config, gpu: Gpu) -> Config:
    """The config; for FITTED the one with the least to compute at these sizes of the problem: its tiles fill the processors,
    and cover queries and keys, better than those of the others.

    Lengths that 128 divides have two consumers or one, so that parts of a sequence are computed as the whole is.
    """
    if config["consumers"]:
        return config
    shapes, trio = [(1.0, _pair(problem))], _trio(problem)
    divided = sizes.seqlen_q % 128 == sizes.seqlen_k % 128 == 0
    if not divided and (not sizes.causal or _persistent(sizes, gpu, trio)["persistent"]):
        gains = next(gains for width, gains in TRIO_GAINS.items() if problem.head_dim <= width)
        shapes.append((gains[sizes.causal], trio))
    if problem.head_dim in LONE_GAINS and sizes.causal and sizes.causal_offset == 0 and sizes.seqlen_k > LONE_KEYS:
        shapes.append((LONE_GAINS[problem.head_dim], _lone(problem)))
    return _persistent(sizes, gpu, min(shapes, key=lambda one: _pairs_of_busiest(sizes, gpu, one[1]) / one[0])[1])


def _pairs_of_busiest(sizes: AttentionProblem | ProblemShape, gpu: Gpu, shape: Shape) -> float:
    """Pairs of a row and a key that the busiest processor computes, masked ones of a tile too. Under a causal mask, where tiles
    of different cost even each other out, those of the average one, and what a diagonal costs."""
    rows, keys = shape["consumers"] * ROWS, shape["block_n"]
    tiles, heads, last = cdiv(sizes.seqlen_q, rows), sizes.batch * sizes.heads, cdiv(sizes.seqlen_k, keys)
    if not sizes.causal:
        return cdiv(tiles * heads, gpu.sm_count) * rows * last * keys
    before = max(0, cdiv(sizes.causal_offset, keys))  # tiles of keys that all queries see
    of_head = ((tiles - 1) * (before + tiles * (rows // keys) / 2) + last) * keys + tiles * DIAGONAL_KEYS
    return of_head * heads / gpu.sm_count * rows


def _tiles_each(problem: AttentionProblem, gpu: Gpu, shape: Shape) -> float:
    """Tiles of queries for each processor."""
    return problem.batch * problem.heads * cdiv(problem.seqlen_q, shape["consumers"] * ROWS) / gpu.sm_count


def _rows_ratio(problem: AttentionProblem, gpu: Gpu, shape: Shape, other: Shape) -> float:
    """Rows of queries that the busiest processor works through in tiles of a shape, by those in tiles of another."""
    rows, others = (ceil(_tiles_each(problem, gpu, one)) * one["consumers"] for one in (shape, other))
    return rows / others


def _wide_shapes(problem: AttentionProblem) -> tuple[Shape, ...]:
    short, deep = shape_of(2, 64, 1, 2, own_out=0), shape_of(2, 64, 2, 3, stages_v=2, own_out=0)
    long, lone = shape_of(2, 128, 1, 2, own_out=0), shape_of(1, 64, 1, 2, occupancy=2, own_out=0)
    # Of 240 registers a thread the output takes half its width, the scores 64 at 128 keys, and P 32; a window's second loop
    # spills then.
    few_out = sum(head_parts(problem.head_dim_v)) <= 160
    if few_out and not problem.features.window and tile_bytes(problem, long) <= SHARED_BYTES:
        if tile_bytes(problem, lone) > SHARED_BYTES // 2:
            return long, short
        few_keys = 1024 if problem.head_dim == problem.head_dim_v and not is_packed(problem) else 896
        few = problem.causal and problem.seqlen_k <= few_keys
        return (lone, long) if few and not _ragged(problem) else (long, lone)
    return (deep, short) if tile_bytes(problem, deep) <= SHARED_BYTES else (short,)


def _windowed_shapes(problem: AttentionProblem, width: int) -> tuple[Shape, ...]:
    """The shorter the window, the more of a large tile it hides."""
    if width <= 64:
        return shape_of(1, 64, 2, 3, occupancy=3), shape_of(1, 128, 2, 2, occupancy=2)
    pair, lone = shape_of(2, 128, 2, 2), shape_of(1, 64, 2, 2, occupancy=2)
    return (pair, lone) if _keys_in_window(problem) > SOME_KEYS else (lone, pair)


def _keys_in_window(problem: AttentionProblem) -> int:
    """Keys that a query sees at the most."""
    features, keys = problem.features, problem.seqlen_k
    left = keys if features.window_left is None else features.window_left
    right = features.window_right or 0 if problem.causal or features.window_right is not None else keys
    return min(left + right + 1, keys)


def _packed_shapes(problem: AttentionProblem, width: int, gpu: Gpu) -> tuple[Shape, ...]:
    """Shapes by the longest sequence, the only length that the host has: the shorter, the fewer rows and keys a tile has."""
    if width <= 64:
        small = shape_of(1, 64, 2, 3, occupancy=3), shape_of(1, 128, 2, 2, occupancy=2)
        trio = shape_of(3, 128, 1, 2)
        many = min(problem.seqlen_q, _keys_in_window(problem)) >= MANY_KEYS and _tiles_each(problem, gpu, trio) >= MANY_ROUNDS
        return (trio, *small) if many else small
    if width > 128:
        return _wide_shapes(problem)
    pair = shape_of(2, 128, 2, 2, stages_v=3, own_out=0)
    half, lone = shape_of(2, 64, 2, 4), shape_of(1, 64, 2, 2, occupancy=2)
    if problem.features.window and _keys_in_window(problem) <= 2 * SOME_KEYS:
        return half, lone
    many = problem.seqlen_k >= MANY_EACH * problem.seqlen_q
    if problem.features.page and many:  # few tiles share keys, which come from memory in small copies
        return shape_of(2, 128, 1, 3, own_out=0), pair
    if many or problem.seqlen_q >= 2048:
        return pair, half
    return (half, pair, lone) if problem.seqlen_q * heads_of_tile(problem) > FULL_HEAD else (lone, half)


def _biased_shapes(problem: AttentionProblem, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The shapes of at most two consumers, as three have no registers for a bias; O in Q's memory where both do not fit next to
    what an additive bias takes."""
    # A processor has 228 KB, of which a block takes up to 2 for its barriers and for itself.
    fit = [shape["occupancy"] * (tile_bytes(problem, shape) + 2048) <= 228 << 10 for shape in shapes]
    shapes = tuple(shape if good else shape | {"own_out": 0} for shape, good in zip(shapes, fit, strict=True))
    return tuple(shape for shape in shapes if shape["consumers"] < 3)


def _ragged(problem: AttentionProblem) -> bool:
    """Whether rows do not begin at whole sectors of 32 bytes. Copies cost more then, so that tiles of more queries win."""
    return problem.head_dim % 16 > 0 or problem.head_dim_v % 16 > 0


def shape_of(
    consumers: int, block_n: int, stages_q: int, stages: int, stages_v: int | None = None, occupancy: int = 1, own_out: int = 1
) -> Shape:  # fmt: skip
    """A Shape; V has as many stages as K unless it has ``stages_v``."""
    return {
        "consumers": consumers, "block_n": block_n, "stages_q": stages_q, "stages_k": stages, "stages_v": stages_v or stages,
        "own_out": own_out, "occupancy": occupancy,
    }  # fmt: skip


def tile_bytes(problem: AttentionProblem, shape: Shape) -> int:
    """Bytes of shared memory of a program's tiles."""
    width, width_out = sum(head_parts(problem.head_dim)), sum(head_parts(problem.head_dim_v))
    width_v = cdiv(problem.head_dim_v, chunk_columns(problem)) * chunk_columns(problem)
    own_out = shape["own_out"] or not out_fits_query(problem)
    keys = shape["block_n"] * (shape["stages_k"] * width + shape["stages_v"] * width_v)
    exchanged = shape["consumers"] * EXCHANGE_BYTES if problem.features.bias == "additive" else 0
    return 2 * (keys + shape["consumers"] * ROWS * (shape["stages_q"] * width + own_out * width_out)) + exchanged


# Two consumers of 128 keys, or one or three of 64, by the lengths of a call (``fitted``).
FITTED = shape_of(0, 0, 0, 0, own_out=0, occupancy=0)


def _scheduled(problem: AttentionProblem, gpu: Gpu, shape: Shape) -> Config:
    """Packed sequences, and tiles of queries that a window makes about equal, are scheduled one by one."""
    if is_packed(problem) or problem.features.window or shape is FITTED:
        return Config(**shape, persistent=int(shape is not FITTED), paired=0)
    return _persistent(problem, gpu, shape)


def _persistent(problem: AttentionProblem | ProblemShape, gpu: Gpu, shape: Shape) -> Config:
    """Persistent and, when causal, in pairs, where there is enough work for that; else one tile, and one Q, a program."""
    config = Config(**shape, persistent=1, paired=int(problem.causal))
    pairs = problem.batch * problem.heads * cdiv(tiles_of_head(problem, config), 2)
    if problem.causal and pairs < gpu.sm_count * shape["occupancy"]:
        return Config(**shape | {"stages_q": 1}, persistent=0, paired=0)
    return config
