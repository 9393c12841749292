"""Which tiles a program of fwd_gluon_sm90.py works on: of queries, dealt out to programs, and of keys, those that rows see."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.forward.prefill_sm90.config import PAIRS, PAIRS_THEN_TILES


@gluon.jit
def steps_of_program(tiles_m, heads_all, pair_rounds, DEAL: gl.constexpr):
    """Steps that a program takes; in some of the last it may find no work."""
    programs = gl.num_programs(0)
    if DEAL == PAIRS_THEN_TILES:
        pairs = (tiles_m + 1) // 2
        dealt = pair_rounds * programs
        left = heads_all * tiles_m - dealt // pairs * tiles_m - dealt % pairs * 2
        return 2 * pair_rounds + (left + programs - 1) // programs
    elif DEAL == PAIRS:
        return 2 * ((heads_all * ((tiles_m + 1) // 2) + programs - 1) // programs)
    else:
        return (heads_all * tiles_m + programs - 1) // programs


@gluon.jit
def piece(step, tiles_m, heads_all, pair_rounds, CAUSAL: gl.constexpr, DEAL: gl.constexpr):
    """What to do in a step: (is there work, tile of queries, batch * heads + head).

    Neighbouring programs work on one head, whose K and V they then share in L2. A causal tile costs as many key tiles as its
    place from the top: a pair of the n-th from the bottom and the n-th from the top always costs the same, so that pairs dealt
    out evenly load every program evenly, but for the last round. What ``pair_rounds`` rounds of them leave goes out tile by
    tile then, as everything does where there are too few pairs: the heaviest first.
    """
    if DEAL == PAIRS_THEN_TILES:
        if step < 2 * pair_rounds:
            has_work, tile, head = _half_pair(step, tiles_m, heads_all)
        else:
            has_work, tile, head = _left_over(step - 2 * pair_rounds, tiles_m, heads_all, pair_rounds)
        return has_work, tile, head
    elif DEAL == PAIRS:
        return _half_pair(step, tiles_m, heads_all)
    else:
        index = step * gl.num_programs(0) + gl.program_id(0)
        if CAUSAL:
            return index < heads_all * tiles_m, tiles_m - 1 - index // heads_all, index % heads_all
        else:
            return index < heads_all * tiles_m, index % tiles_m, index // tiles_m


@gluon.jit
def _half_pair(step, tiles_m, heads_all):
    """What ``piece`` gives of pairs: in even steps the lower tile of one, in odd steps its other, if it is another."""
    pairs = (tiles_m + 1) // 2
    unit = step // 2 * gl.num_programs(0) + gl.program_id(0)
    low = unit % pairs
    high = tiles_m - 1 - low
    second = step % 2 == 1
    return (unit < heads_all * pairs) & ((low != high) | (step % 2 == 0)), gl.where(second, high, low), unit // pairs


@gluon.jit
def _left_over(turn, tiles_m, heads_all, pair_rounds):
    """What ``piece`` gives in a turn after the pairs. Dealt to and fro, so that who gets the heavier tile in one turn gets the
    lighter one in the next.

    Left are the heads that no pair was taken of, and one whose first pairs are gone: its inner tiles. Tiles of one place in
    their heads stand together, so a place has as many of them as heads that have it left.
    """
    programs = gl.num_programs(0)
    pairs = (tiles_m + 1) // 2
    begun = pair_rounds * programs // pairs  # the head whose inner tiles are left
    taken = pair_rounds * programs % pairs  # pairs of it
    heads = heads_all - begun - 1
    outer = heads * taken
    inner = (heads + 1) * (tiles_m - 2 * taken)
    index = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
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
def key_tiles(first_row, rows, span, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr):
    """Tiles of keys that rows [first_row, first_row + rows) look at: (the first, the one after the last).

    At least one, so that every row gets a result, and two where the diagonal may cross as many: the last may hold no key that
    they see. ``span``: see ``mask_keys``.
    """
    seqlen_q, seqlen_k, to_last, prefix, left = span
    end = seqlen_k
    if CAUSAL:
        own = first_row + rows + to_last
        if prefix is not None:
            own = gl.maximum(own, prefix)
        end = gl.minimum(end, own)
    tiles = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 2 if CAUSAL and not ALIGNED else 1)
    if left is None:
        return 0, tiles
    else:
        return gl.minimum(gl.maximum(first_row + seqlen_k - seqlen_q - left, 0) // BLOCK_N, tiles - 1), tiles
