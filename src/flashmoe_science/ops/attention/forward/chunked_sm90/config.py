"""What chunk_gluon_sm90 serves, the shapes of its programs, the number of splits of keys, and what its builds depend on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from flashmoe_science.hardware.gpus import GPUS, Gpu, why_no_hopper
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.device.sm90 import ROWS, consumer_registers, producer_registers, window_of
from flashmoe_science.ops.attention.device.splits import MAX_ORDERED, Work, num_splits, partial_bytes
from flashmoe_science.ops.attention.device.tma import fills_tiles, rows_of_copy, value_parts, why_not_on_sm90
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.ops.attention.problem.features import PLAIN, Features, unsupported
from flashmoe_science.ops.descriptors import Tile
from flashmoe_science.ops.launch import cdiv, next_power_of_2

MIN_SPLIT_KEYS = 512  # to write and merge a partial costs about as much as to attend to these
FULL_TILES = 256  # queries of a head
SPLIT_KEYS = 1280  # from which on splits pay where queries are few
SHORT_WINDOW = 2 * ROWS  # keys: a program's first and last tile of keys are most of what it sees
LONG_KEYS = 2048  # where half of a consumer's rows are worth it
HALF_EQUAL = 131072  # keys of all key heads and sequences up to which they are: beyond, the memory's speed decides
HALF_UNEQUAL = 524288  # the same of sequences of unequal lengths
# The kernel's last integers, which no build is specialised on.
LAST_SIZES = ("stride_lse", "heads_kv", "seqlen_q", "seqlen_k", "splits", "all_rows", "stride_table", "batches")
_NAMES = ("consumers", "block_n", "stages_k", "stages_v", "occupancy", "num_splits")
_SERVED = ("window", "softcap", "sinks", "ragged", "packed", "page")
_RAGGED = Features(lengths="ragged")
_FWD_TOO = {"packed", "page", "window", "softcap", "sinks"}  # what prefill_sm90 serves of what this kernel does


def supports(problem: AttentionProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    return why_not_on_sm90(problem, device) or unsupported(problem.features, _SERVED)


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """A consumer's 64 rows are full or nearly so, and keys are many for each query, or there are features; or half of the rows
    are, and keys are split, neither short nor more in all than the memory's speed allows.

    Where keys are not split and a head's queries fill the tiles of prefill_sm90, that is faster, with caps and sinks too, and
    of packed sequences and in windows. Where all queries fill fewer tiles than there are processors, or twice as many under a
    causal mask, whose longest tile would last longest, keys are split to use all.
    """
    group = problem.heads // problem.heads_kv
    rows = problem.seqlen_q * group
    if problem.seqlen_q == 1 or rows < ROWS // 2:
        return False
    kinds = set(problem.features.kinds())
    if kinds & {"packed", "window"} and kinds <= _FWD_TOO and fills_tiles(problem, gpu):
        return False
    unequal = problem.features == _RAGGED and problem.batch > 1
    whole = problem.features == PLAIN or (kinds <= {"softcap", "sinks"} and fills_tiles(problem, gpu))
    if not whole and not (unequal and rows == ROWS // 2):
        window = _window_keys(problem)  # with a query in each row, half of a short one's scores are masked
        return rows > ROWS // 2 and (window is None or window > SHORT_WINDOW or queries_of(group) < ROWS)
    config = configs(problem, gpu)[0]
    work = work_in(problem, config)
    split = splits_for(work, config, gpu) > 1
    if rows == ROWS // 2:
        keys = work.heads * problem.seqlen_k
        return split and problem.seqlen_k >= LONG_KEYS and keys <= (HALF_UNEQUAL if unequal else HALF_EQUAL)
    if _row_tiles(problem) < gpu.sm_count * (2 if problem.causal else 1):
        wide = padded_head_dim(problem.head_dim) > 128  # with which the portable kernel spills
        if wide or (problem.seqlen_q >= FULL_TILES and split and problem.seqlen_k >= SPLIT_KEYS):
            return True
    return (problem.seqlen_q < FULL_TILES or split) and problem.seqlen_k >= max(2048, 4 * problem.seqlen_q)


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Shapes of the program, the best guess first. ``num_splits`` of 0: chosen for each problem."""
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    if width <= 64:
        pair, lone = (2, 128, 3, 3, 1), (1, 128, 3, 3, 2)
    elif width <= 128:
        pair, lone = (2, 128, 3, 3, 1), (1, 64, 3, 3, 2)
    else:
        pair, lone = (2, 64, 2, 2, 1), (1, 64, 2, 2, 1)
    window = _window_keys(problem)
    few = problem.seqlen_q <= queries_of(problem.heads // problem.heads_kv)
    few |= width <= 64 and (problem.features.sinks or window is not None)
    few |= problem.features == PLAIN and device is not None and 2 * _row_tiles(problem) <= device.sm_count
    shapes = [lone, pair] if few else [pair, lone]
    if width <= 64 and window is not None and window <= SHORT_WINDOW:
        shapes.insert(0, (1, 64, 2, 2, 3))  # few tiles a program: others work while one starts and ends
    if width > 128 and problem.causal and problem.heads == problem.heads_kv:
        shapes.remove(pair)  # it spills 128 bytes a thread
    return tuple(Config(**dict(zip(_NAMES, (*shape, 0), strict=True))) for shape in shapes)


def _row_tiles(problem: AttentionProblem) -> int:
    """Tiles of one consumer that the queries of all heads and sequences fill."""
    return problem.batch * problem.heads * cdiv(problem.seqlen_q, ROWS)


def heads_of(group: int) -> int:
    """Query heads in a consumer's rows: a power of two, of which those past ``group`` are zeros."""
    return min(ROWS, 1 << (group - 1).bit_length())


def queries_of(group: int) -> int:
    """Queries in a consumer's rows."""
    return ROWS // heads_of(group)


def span_of(problem: AttentionProblem, group: int, queries: int, config: Config) -> int | None:
    """The most keys that a program's queries see in a window; None where they may see all."""
    window = _window_keys(problem)
    return None if window is None else window + min(queries, config["consumers"] * queries_of(group))


def _window_keys(problem: AttentionProblem) -> int | None:
    """Keys that a query sees but the one at its own place; None where no window limits them on both sides."""
    left, right = problem.features.window_left, 0 if problem.causal else problem.features.window_right
    return None if left is None or right is None else left + right


def work_of(heads_kv: int, group: int, queries: int, keys: int, config: Config, span: int | None = None) -> Work:
    """The Work of ``heads_kv`` key heads, of all sequences, with ``group`` query heads of ``queries`` rows each that see
    ``span`` keys a program at the most (None: all)."""
    tiles_m = cdiv(queries, config["consumers"] * queries_of(group))
    seen = cdiv(keys, config["block_n"])
    if span is not None:
        seen = min(seen, cdiv(span, config["block_n"]) + 1)
    return Work(heads_kv * cdiv(group, heads_of(group)), tiles_m, max(1, seen))


def work_in(problem: AttentionProblem, config: Config) -> Work:
    """The Work of a problem by its text."""
    group = problem.heads // problem.heads_kv
    span = span_of(problem, group, problem.seqlen_q, config)
    return work_of(problem.batch * problem.heads_kv, group, problem.seqlen_q, problem.seqlen_k, config, span)


def min_tiles(config: Config) -> int:
    """The fewest tiles of keys of a split."""
    return max(1, MIN_SPLIT_KEYS // config["block_n"])


def splits_for(work: Work, config: Config, gpu: Gpu, asked: int = 0) -> int:
    """The number of splits of the keys: ``asked`` or the config's if not 0, else what the work and the GPU suggest."""
    return num_splits(work, min_tiles(config), asked or config["num_splits"], gpu.sm_count, config["occupancy"])


def workspace(problem: AttentionProblem, config: Config) -> int:
    """Bytes of the partials, on the GPU that takes the most."""
    work = work_in(problem, config)
    hoppers = [gpu for gpu in GPUS.values() if why_no_hopper(gpu) is None]
    splits = max(splits_for(work, config, gpu) for gpu in hoppers)
    return partial_bytes(problem.batch * problem.heads * problem.seqlen_q, splits, problem.head_dim_v)


class Variant(NamedTuple):
    """What a call's sizes decide of a build; the rest follows from its plan."""

    group: int
    split: bool
    compensated: bool
    batches: int  # a power of two no less than the sequences, where they start in LPT order; else 0
    strides: Hashable


def compared(problem: AttentionProblem, batch: int, programs: int, config: Config, gpu: Gpu) -> int:
    """``Variant.batches`` of a launch: 0 where all programs run at once, or lengths are too many."""
    if problem.features.lengths == "equal" or not 1 < batch <= MAX_ORDERED or programs <= gpu.sm_count * config["occupancy"]:
        return 0
    return next_power_of_2(batch)


def constexprs_of(problem: AttentionProblem, config: Config, variant: Variant, early: bool) -> dict[str, Any]:
    queries = config["consumers"] * queries_of(variant.group)
    left, right = window_of(problem)
    ends = problem.causal or right is not None
    producer = producer_registers(rows_of_copy(problem, config) == config["block_n"])
    return {
        "GROUP": variant.group, "DV": problem.head_dim_v, "CONSUMERS": config["consumers"], "BLOCK_N": config["block_n"],
        "STAGES_K": config["stages_k"], "STAGES_V": config["stages_v"], "MIN_TILES": min_tiles(config),
        # The most tiles of keys that the diagonal of a program's queries crosses.
        "PEELED": 1 + cdiv(queries - 1, config["block_n"]) if ends and left is None else 1,
        "CAUSAL": ends, "TOPLEFT": problem.mask == "causal-topleft", "SPLIT": variant.split,
        "COMPENSATED": variant.compensated, "PAGE": problem.features.page, "BATCHES": variant.batches, "EARLY_START": early,
        "CONSUMER_REGS": consumer_registers(config, producer), "PRODUCER_REGS": producer,
    }  # fmt: skip


def tile_shapes(problem: AttentionProblem, config: Config, group: int) -> tuple[Tile | None, ...]:
    """Copies of Q, K and V, then of their second parts: None for each that has none."""
    parts, parts_v = head_parts(problem.head_dim), value_parts(problem.head_dim_v)
    of_q, of_k = (1, 1, heads_of(group), queries_of(group)), (1, 1, rows_of_copy(problem, config))
    tensors = ((of_q, parts), (of_k, parts), (of_k, parts_v))
    return tuple((*rows, widths[n]) if n < len(widths) else None for n in range(2) for rows, widths in tensors)
