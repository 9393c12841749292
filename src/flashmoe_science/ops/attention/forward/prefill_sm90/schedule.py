"""The tile scheduler of fwd_gluon_sm90: the tiles of queries of a program, and the tiles of keys that rows see."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.forward.prefill_sm90.variant import PAIRED, PAIRED_TAIL


@gluon.jit
def steps_of_program(sizes, SCHEDULE: gl.constexpr):
    """The number of steps of a program; in some of the last it may find no work."""
    tiles_m, heads_all, pair_rounds = sizes.tiles_m, sizes.heads_all, sizes.pair_rounds
    programs = gl.num_programs(0)
    if SCHEDULE == PAIRED_TAIL:
        pairs = (tiles_m + 1) // 2
        scheduled = pair_rounds * programs
        left = heads_all * tiles_m - scheduled // pairs * tiles_m - scheduled % pairs * 2
        return 2 * pair_rounds + (left + programs - 1) // programs
    elif SCHEDULE == PAIRED:
        return 2 * ((heads_all * ((tiles_m + 1) // 2) + programs - 1) // programs)
    else:
        return (heads_all * tiles_m + programs - 1) // programs


@gluon.jit
def tile_at(step, sizes, CAUSAL: gl.constexpr, SCHEDULE: gl.constexpr):
    """The tile of a step: (is there one, tile of queries, batch * heads + head).

    Neighbouring programs work on one head, whose K and V they then share in L2. A causal tile costs as many key tiles as its
    place from the top: a pair of the n-th from the bottom and the n-th from the top always costs the same, so that pairs load
    every program evenly, but for the last round. What ``pair_rounds`` rounds of them leave is scheduled tile by tile, as all
    tiles are where there are too few pairs: the heaviest first.
    """
    tiles_m, heads_all, pair_rounds = sizes.tiles_m, sizes.heads_all, sizes.pair_rounds
    if SCHEDULE == PAIRED_TAIL:
        if step < 2 * pair_rounds:
            has_work, tile, head = _half_pair(step, tiles_m, heads_all)
        else:
            has_work, tile, head = _tail(step - 2 * pair_rounds, tiles_m, heads_all, pair_rounds)
        return has_work, tile, head
    elif SCHEDULE == PAIRED:
        return _half_pair(step, tiles_m, heads_all)
    else:
        index = step * gl.num_programs(0) + gl.program_id(0)
        if CAUSAL:
            return index < heads_all * tiles_m, tiles_m - 1 - index // heads_all, index % heads_all
        else:
            return index < heads_all * tiles_m, index % tiles_m, index // tiles_m


@gluon.jit
def _half_pair(step, tiles_m, heads_all):
    """``tile_at`` of pairs: in even steps the lower tile of one, in odd steps its other, if it is another."""
    pairs = (tiles_m + 1) // 2
    unit = step // 2 * gl.num_programs(0) + gl.program_id(0)
    low = unit % pairs
    high = tiles_m - 1 - low
    second = step % 2 == 1
    return (unit < heads_all * pairs) & ((low != high) | (step % 2 == 0)), gl.where(second, high, low), unit // pairs


@gluon.jit
def _tail(step, tiles_m, heads_all, pair_rounds):
    """``tile_at`` of the steps after the pairs. Snake order: balances causal work between consecutive waves.

    Left are the heads without a scheduled pair, and the inner tiles of one whose first pairs are scheduled. They are ordered by
    place, the tile's number in its head: each place has one tile of every head that has it left.
    """
    programs = gl.num_programs(0)
    pairs = (tiles_m + 1) // 2
    begun = pair_rounds * programs // pairs  # the head whose inner tiles are left
    taken = pair_rounds * programs % pairs  # pairs of it
    heads = heads_all - begun - 1
    outer = heads * taken
    inner = (heads + 1) * (tiles_m - 2 * taken)
    index = step * programs + gl.where(step % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    has_work = index < 2 * outer + inner
    place = tiles_m - 1
    head = begun + 1
    if index >= outer + inner:
        index -= outer + inner
        place = taken - 1
    elif index >= outer:
        index -= outer
        place = tiles_m - 1 - taken
        head = begun
        heads += 1
    heads = gl.maximum(heads, 1)
    return has_work, place - index // heads, head + index % heads


@gluon.jit
def key_tiles(first_row, rows, bounds, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Tiles of keys that rows [first_row, first_row + rows) see: (the first, the one after the last).

    At least one, so that every row gets a result: the last may hold no key that they see.
    """
    end = bounds.seqlen_k
    if CAUSAL:
        own = first_row + rows + bounds.diagonal
        if bounds.prefix is not None:
            own = gl.maximum(own, bounds.prefix)
        end = gl.minimum(end, own)
    tiles = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
    if bounds.left is None:
        return 0, tiles
    else:
        begin = gl.maximum(first_row + bounds.seqlen_k - bounds.seqlen_q - bounds.left, 0)
        return gl.minimum(begin // BLOCK_N, tiles - 1), tiles
