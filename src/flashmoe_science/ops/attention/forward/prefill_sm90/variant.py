"""What builds and launches of fwd_gluon_sm90 depend on: constants, the schedule of tiles of queries, the grid, TMA tiles."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.kernel import ProblemShape
from flashmoe_science.ops.attention.device.sm90 import ROWS, consumer_registers, producer_registers
from flashmoe_science.ops.attention.device.tma import rows_of_copy
from flashmoe_science.ops.attention.device.wide import CHUNK
from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import max_tiles, numbers
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.ops.attention.problem.lengths import sequence_lengths
from flashmoe_science.ops.descriptors import Tile
from flashmoe_science.ops.launch import Grid, cdiv

MAX_HEADS = 8  # of packed sequences in a consumer's rows: the swizzle of shared memory repeats with eight rows
# How tiles of queries are scheduled. The last rounds of pairs go out as single tiles where a head has many: the few of a short
# one would be spread over too many programs. With fewer tiles they do so for three consumers, and where whole rounds would
# waste much, but not where several programs share a processor, unless all tiles cost about the same.
LINEAR, PAIRED, PAIRED_TAIL = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LAST_ROUNDS, MANY_TILES, SOME_TILES, MUCH_WASTE = 3, 32, 12, 0.05
FEW_ROUNDS, MAX_WASTE = 4, 0.15  # of so few rounds so much is not wasted, however few tiles a head has
# The kernel's last integers, which no build is specialised on: a new batch or length must not compile anew.
SIZES = ("heads", "group", "seqlen_q", "seqlen_k", "causal_offset", "tiles_m", "heads_all", "pair_rounds")
EVEN = 2  # times as many keys before the diagonal as there are queries


class Variant(NamedTuple):
    """What a call's sizes and its bias decide of a build; the rest follows from its plan."""

    aligned: bool
    even_k: bool
    schedule: int
    bias_unit: int


def variant_of(problem: AttentionProblem | ProblemShape, config: Config, gpu: Gpu, bias_unit: int) -> Variant:
    """The Variant of a problem's sizes, of a bias of which ``bias_unit`` elements are read at once."""
    even_k = problem.seqlen_k % config["block_n"] == 0
    return Variant(_aligned(problem), even_k, schedule_of(problem, config, gpu).value, bias_unit)


# Of packed sequences: lengths, which only the device has, decide nothing of a build.
PACKED = Variant(aligned=False, even_k=False, schedule=LINEAR.value, bias_unit=1)


def is_packed(problem: AttentionProblem) -> bool:
    """Whether sequences are packed, so that their tiles are listed on the device."""
    return problem.features.lengths == "packed"


def constexprs_of(problem: AttentionProblem, config: Config, variant: Variant, write_lse: bool) -> dict[str, Any]:
    """The constants of a build, in the order of the kernel's parameters."""
    producer = producer_registers(rows_of_copy(problem, config) == config["block_n"])
    return {
        "CONSUMERS": config["consumers"], "BLOCK_N": config["block_n"],
        "STAGES_Q": config["stages_q"], "STAGES_K": config["stages_k"], "STAGES_V": config["stages_v"],
        "CAUSAL": problem.causal or problem.features.window_right is not None,
        "ALIGNED": variant.aligned, "EVEN_K": variant.even_k, "WRITE_LSE": write_lse,
        "OWN_OUT": bool(config["own_out"]) or not out_fits_query(problem),
        "SCHEDULE": variant.schedule, "UNIT": variant.bias_unit, "PAGE": problem.features.page,
        "CONSUMER_REGS": consumer_registers(config, producer), "PRODUCER_REGS": producer,
    }  # fmt: skip


def chunk_columns(problem: AttentionProblem) -> int:
    """Columns of V that one copy brings: all of them, or a chunk in the wide form (device/wide.py)."""
    return CHUNK.value if len(head_parts(problem.head_dim_v)) > 1 else padded_head_dim(problem.head_dim_v)


def out_fits_query(problem: AttentionProblem) -> bool:
    """Whether the parts of a tile of O are the first of those of Q, so that they can take their place."""
    of_out = head_parts(problem.head_dim_v)
    return head_parts(problem.head_dim)[: len(of_out)] == of_out


def _aligned(problem: AttentionProblem | ProblemShape) -> bool:
    """Whether the diagonal of a consumer's rows is in one tile of keys, its first, so that no other needs a mask."""
    return problem.causal and problem.causal_offset % ROWS == 0


def _paired(problem: AttentionProblem | ProblemShape, config: Config) -> bool:
    return problem.causal and bool(config["paired"])


def schedule_of(problem: AttentionProblem | ProblemShape, config: Config, gpu: Gpu) -> gl.constexpr:
    """How tiles of queries are scheduled: LINEAR, PAIRED or PAIRED_TAIL."""
    if not _paired(problem, config):
        return LINEAR
    tiles_m = tiles_of_head(problem, config)
    pairs = problem.batch * problem.heads * cdiv(tiles_m, 2)
    # Of processors: programs that share one even out each other's share. Of an odd number of tiles one is a pair by itself.
    rounds = cdiv(pairs, gpu.sm_count)
    most = 2 * rounds - tiles_m % 2 * (rounds // cdiv(tiles_m, 2))
    waste = most * gpu.sm_count / (problem.batch * problem.heads * tiles_m) - 1.0
    if waste > MAX_WASTE and pairs <= FEW_ROUNDS * gpu.sm_count:
        return PAIRED_TAIL
    some = config["consumers"] == 3 or (waste > MUCH_WASTE and (config["occupancy"] == 1 or _even(problem)))
    return PAIRED_TAIL if tiles_m >= (SOME_TILES if some else MANY_TILES) else PAIRED


def _even(problem: AttentionProblem | ProblemShape) -> bool:
    """Whether enough keys are before the diagonal that all tiles of queries cost about the same."""
    return problem.causal_offset >= EVEN * problem.seqlen_q


def pair_rounds_of(problem: AttentionProblem | ProblemShape, config: Config, programs: int) -> int:
    """Whole rounds of pairs of tiles that ``programs`` programs take before single tiles."""
    pairs = problem.batch * problem.heads * cdiv(tiles_of_head(problem, config), 2)
    return max(0, pairs // programs - LAST_ROUNDS)


def tiles_of_head(problem: AttentionProblem | ProblemShape, config: Config) -> int:
    """Tiles of queries of a head."""
    return cdiv(problem.seqlen_q, config["consumers"] * ROWS)


def grid_of(problem: AttentionProblem | ProblemShape, config: Config, gpu: Gpu) -> Grid:
    """The grid of sequences of equal lengths."""
    tiles_m, heads = tiles_of_head(problem, config), problem.batch * problem.heads
    pairs = cdiv(tiles_m, 2)
    work = heads * (pairs if _paired(problem, config) else tiles_m)
    programs = gpu.sm_count * config["occupancy"]
    if not config["persistent"] or work <= programs:
        return work, 1, 1
    # Of an odd number of tiles the middle one has no partner. With one program fewer each program gets one at times; else they
    # might always go to the same programs, which would idle for half of their time.
    if _paired(problem, config) and tiles_m % 2 and gcd(programs, pairs) > 1:
        programs -= 1
    return programs, 1, 1


def tile_shapes(problem: AttentionProblem, config: Config) -> tuple[Tile | None, ...]:
    """Copies of Q, K, V and O, then of their second parts: None for each that has none. Those of packed sequences end where
    one does (``descriptors.ragged``)."""
    parts, of_v, of_out = head_parts(problem.head_dim), (chunk_columns(problem),), head_parts(problem.head_dim_v)
    of_q: Tile = (1, 1, ROWS)
    of_k: Tile = (1, 1, rows_of_copy(problem, config))
    if is_packed(problem):
        heads = heads_of_tile(problem)
        of_q, of_k = (1, 1, heads, ROWS // heads), (1, *of_k)
    tensors = ((of_q, parts), (of_k, parts), (of_k, of_v), (of_q, of_out))
    return tuple((*rows, parts[n]) if n < len(parts) else None for n in range(2) for rows, parts in tensors)


def heads_of_tile(problem: AttentionProblem) -> int:
    """Query heads of one key head in a consumer's rows: few queries fill more of them so. ALiBi has a slope for a tile."""
    group = problem.heads // problem.heads_kv
    return min(group & -group, MAX_HEADS) if is_packed(problem) and problem.features.bias == "none" else 1


def queries_of_tile(problem: AttentionProblem, config: Config) -> int:
    """Queries of one head in a program's tile."""
    return config["consumers"] * ROWS // heads_of_tile(problem)


def packed_grid(tiles: int, config: Config, gpu: Gpu) -> Grid:
    """The grid of packed sequences of at the most ``tiles`` tiles."""
    return min(tiles, gpu.sm_count * config["occupancy"]), 1, 1


def max_listed(problem: AttentionProblem, config: Config) -> int:
    """The most tiles of packed sequences that are listed, as the problem's text has them."""
    lengths = sequence_lengths(problem.features, problem.batch, problem.seqlen_q, problem.seqlen_k)
    return max_tiles(sum(one.queries for one in lengths), problem.batch, queries_of_tile(problem, config))


def workspace(problem: AttentionProblem, config: Config) -> int:
    """Bytes of the list of tiles of packed sequences."""
    return 4 * numbers(max_listed(problem, config)) if is_packed(problem) else 0
