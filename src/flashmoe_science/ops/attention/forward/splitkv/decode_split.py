"""One piece of a sequence's keys in decode_gluon.py: its bounds, the copies of its tiles, their products, and what is written.

A program attends its packed rows to a piece. The rows' output is written where the sequence has no other piece, else partials
for merge_triton.py are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flashmoe_science.ops.attention.device.ranges import pieces_of, tiles_between, tiles_in_range
from flashmoe_science.ops.attention.device.softmax import log2_of_sum, with_sink
from flashmoe_science.ops.attention.device.warps import copied_columns, copied_keys, sum_of_warps, swizzled
from flashmoe_science.ops.gluon_bridge import cp_async


@gluon.jit
def _inside(key, start, end, BEGINS: gl.constexpr):
    """Whether keys lie from ``start`` to before ``end``. BEGINS: whether ``start`` may be past 0."""
    inside = key < end
    if BEGINS:
        inside = inside & (key >= start)
    return inside


@gluon.jit
def _pages(
    table, first_key, start, end, PAGE: gl.constexpr, WARPS: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr,
    BEGINS: gl.constexpr,
):  # fmt: skip
    """The pages of a tile's keys: one, or each key's. An entry past the length is never read: it may be anything."""
    if PAGE == 0:
        return first_key
    elif PAGE % (WARPS * OWN) == 0:
        page = first_key * 0
        if first_key < end:
            page = gl.load(table + first_key // PAGE)
        return page
    else:
        key = first_key + copied_keys(WARPS, OWN, WIDTH)
        return gl.load(table + key // PAGE, mask=_inside(key, start, end, BEGINS), other=0)


@gluon.jit
def _start_copy(
    smem, head, page, first_key, start, end, stride_page, stride_row,
    D: gl.constexpr, PAGE: gl.constexpr, BEGINS: gl.constexpr,
):  # fmt: skip
    """Start copies of a tile of K or V, [warps, keys of a warp, width]: of the keys from ``start`` to before ``end``; zeros
    elsewhere, and past the head's own ``D`` columns."""
    WARPS: gl.constexpr = smem.shape[0]
    OWN: gl.constexpr = smem.shape[1]
    WIDTH: gl.constexpr = smem.shape[2]
    place, column = copied_keys(WARPS, OWN, WIDTH), copied_columns(WARPS, WIDTH)
    key = first_key + place
    inside = _inside(key, start, end, BEGINS)
    if PAGE % (WARPS * OWN) == 0:
        if PAGE == 0:
            first_row = first_key.to(gl.int64) * stride_row
        else:
            first_row = page.to(gl.int64) * stride_page + (first_key % PAGE).to(gl.int64) * stride_row
        # Unsigned: to extend signed offsets to 64 bits takes three times the instructions, for which the first copies wait.
        offsets = (gl.expand_dims(place * stride_row, 2) + column).to(gl.uint32).to(gl.int64)
        pointers = head + first_row + offsets
    else:
        rows = page.to(gl.int64) * stride_page + key % PAGE * stride_row
        pointers = head + gl.expand_dims(rows, 2) + column
    if D == WIDTH:
        cp_async(smem, pointers, mask=gl.expand_dims(inside, 2))
    else:
        cp_async(smem, pointers, mask=gl.expand_dims(inside, 2) & (column < D))
    async_copy.commit_group()


@gluon.jit
def piece(
    batch, head_kv, split, in_partials, place, places, range_of,
    q_base, k_base, v_base, out_base, lse_base, partials, cache_seqlens, page_table, cache_batch_idx, leftpads, sinks,
    softmax_scale, before, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, seqlen_k,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om, stride_lse, stride_table,
    heads_kv, seqlen_q, splits, left, right, all_rows,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MIN_TILES: gl.constexpr, SPLIT: gl.constexpr,
    PAGE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ENDS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend the rows of a sequence and key head to a piece of its keys: the ``split``-th of ``splits``, or those in a range.

    ``range_of``: None, or whether programs take ranges, the first tile of keys in the program's, the one past its last, and how
    many tiles the sequence has.

    Writes the output where the sequence has no other piece, else partials: at ``place`` of ``places`` of each of the rows that
    are the ``in_partials``-th so many.
    """
    dtype: gl.constexpr = q_base.dtype.element_ty
    OWN: gl.constexpr = BLOCK_N // WARPS
    BEGINS: gl.constexpr = LEFT or leftpads is not None
    MASKED: gl.constexpr = ENDS or BEGINS or RIGHT
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], swizzled(BLOCK_D, [1, 0]))
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS, OWN, BLOCK_D], swizzled(BLOCK_D, [2, 1, 0]))
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS, OWN, BLOCK_DV], swizzled(BLOCK_DV, [2, 1, 0]))
    batch64, head_kv64 = batch.to(gl.int64), head_kv.to(gl.int64)

    ACROSS: gl.constexpr = BLOCK_D // 8
    of_q: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_q)), 1)
    column = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, of_q)), 0)
    q_tile = q_base + batch64 * stride_qb + head_kv64 * GROUP * stride_qh
    cp_async(
        q_smem, q_tile + (row % GROUP) * stride_qh + (row // GROUP) * stride_qm + column,
        mask=(row < seqlen_q * GROUP) & (column < D),
    )  # fmt: skip
    async_copy.commit_group()
    if cache_seqlens is not None:
        seqlen_k = gl.minimum(before + gl.load(cache_seqlens + batch), seqlen_k)  # never past the capacity
    else:
        seqlen_k = gl.minimum(before, seqlen_k)

    # The keys that some row sees, [start, end).
    diagonal = seqlen_k - seqlen_q
    start, end = 0, seqlen_k
    if leftpads is not None:
        start = gl.maximum(gl.load(leftpads + batch), 0)
    if RIGHT:
        end = gl.minimum(end, seqlen_q + diagonal + right)
    if LEFT:
        start = gl.maximum(start, diagonal - left)
    end = gl.maximum(end, start)
    first_tile, tiles = tiles_between(start, end, BLOCK_N, BEGINS)
    low, high = first_tile, first_tile + tiles
    if SPLIT:
        used = pieces_of(tiles, splits, MIN_TILES)
        each = tiles // used
        more = tiles - each * used  # pieces that have one tile more
        low = gl.minimum(first_tile + each * split + gl.minimum(split, more), first_tile + tiles)
        high = gl.where(split < used, low + each + (split < more).to(gl.int32), low)
    if range_of is not None:
        ranged, low_tile, high_tile, tiles_in = range_of
        own_low, own_high, from_start, to_end = tiles_in_range(first_tile, low_tile, high_tile, tiles_in, MIN_TILES)
        low = gl.where(ranged, own_low, low)
        high = gl.where(ranged, gl.minimum(own_high, first_tile + tiles), high)
    k_head, v_head = k_base + head_kv64 * stride_kh, v_base + head_kv64 * stride_vh
    table = None
    if PAGE == 0:
        cached = batch64
        if cache_batch_idx is not None:
            cached = gl.load(cache_batch_idx + batch).to(gl.int64)
        k_head += cached * stride_kb
        v_head += cached * stride_vb
    else:
        table = page_table + batch64 * stride_table
    top = gl.minimum(end, high * BLOCK_N)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left_operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scale_log2 = softmax_scale * 1.4426950408889634
    of_row: gl.constexpr = gl.SliceLayout(2, mma)
    row_max = gl.full([WARPS, BLOCK_M], float("-inf"), gl.float32, of_row)
    row_sum = gl.zeros([WARPS, BLOCK_M], gl.float32, of_row)
    acc = gl.zeros([WARPS, BLOCK_M, BLOCK_DV], gl.float32, mma)
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, of_row)), 1)
    own_key = gl.expand_dims(gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(0, gl.SliceLayout(1, mma))), 0), 1)
    offset = gl.expand_dims(warp, 2) * OWN + own_key
    query = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, of_row)) // GROUP, 0), 2)
    pages_k = _pages(table, low * BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_D, BEGINS)
    pages_v = _pages(table, low * BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_DV, BEGINS)
    # The first rounds only start copies: the code of a second loop for them would be read from memory as they wait.
    for coming in range(low, high + STAGES - 1):
        slot = (coming - low) % STAGES
        first_coming = coming * BLOCK_N
        _start_copy(k_smem.index(slot), k_head, pages_k, first_coming, start, top, stride_kb, stride_kn, D, PAGE, BEGINS)
        _start_copy(v_smem.index(slot), v_head, pages_v, first_coming, start, top, stride_vb, stride_vn, DV, PAGE, BEGINS)
        if PAGE > 0:  # of the next tile, to be there when its copies start
            pages_k = _pages(table, first_coming + BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_D, BEGINS)
            pages_v = _pages(table, first_coming + BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_DV, BEGINS)
        number = coming - (STAGES - 1)
        if number >= low:
            slot = (number - low) % STAGES
            async_copy.wait_group(2 * STAGES - 1)
            q = gl.expand_dims(q_smem.load(gl.SliceLayout(0, left_operand)), 0)
            q, same = gl.broadcast(q, gl.zeros([WARPS, BLOCK_M, BLOCK_D], dtype, left_operand))
            k = k_smem.index(slot).permute((0, 2, 1)).load(right_operand)
            s = mma_v2(q, k, gl.zeros([WARPS, BLOCK_M, OWN], gl.float32, mma))
            if MASKED:
                key = number * BLOCK_N + offset
                seen = key < end
                if RIGHT:
                    seen = seen & (key <= query + diagonal + right)
                if BEGINS:
                    seen = seen & (key >= start)
                if LEFT:
                    seen = seen & (key >= query + diagonal - left)
                s = gl.where(seen, s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 2) * scale_log2)
            # A row that has seen no key has a maximum of -inf; subtracting 0 instead keeps exp2(-inf) = 0 rather than NaN.
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - shift)
            p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 2))
            row_sum = row_sum * rescale + gl.sum(p, 2)
            row_max = new_max
            acc = acc * gl.expand_dims(rescale, 2)
            async_copy.wait_group(2 * STAGES - 2)
            v = v_smem.index(slot).load(right_operand)
            acc = mma_v2(gl.convert_layout(p.to(dtype), left_operand), v, acc)
    async_copy.wait_group(0)

    row_max, row_sum, acc = sum_of_warps(acc, row_max, row_sum)
    most_rows = seqlen_q * GROUP
    if range_of is not None:
        if gl.where(ranged, from_start & to_end, not SPLIT):
            _write_output(
                out_base, lse_base, sinks, row_max, row_sum, acc, batch64, head_kv, heads_kv, most_rows,
                stride_ob, stride_oh, stride_om, stride_lse, GROUP, DV,
            )  # fmt: skip
        else:
            _write_partials(partials, row_max, row_sum, acc, in_partials, place, places, all_rows, most_rows, DV)
    elif SPLIT:
        _write_partials(partials, row_max, row_sum, acc, in_partials, place, places, all_rows, most_rows, DV)
    else:
        _write_output(
            out_base, lse_base, sinks, row_max, row_sum, acc, batch64, head_kv, heads_kv, most_rows,
            stride_ob, stride_oh, stride_om, stride_lse, GROUP, DV,
        )  # fmt: skip


@gluon.jit
def _write_partials(partials, row_max, row_sum, acc, in_partials, place, places, all_rows, most_rows, DV: gl.constexpr):
    """Leave the maxima, sums and unscaled output of rows to the merge."""
    of_out: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], row_max.type.layout)
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, of_out)), 1)
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, of_out)), 0)
    first_in_all = in_partials * most_rows.to(gl.int64) * places + place
    sums = partials + all_rows.to(gl.int64) * places * DV + 2 * first_in_all
    gl.store(partials + first_in_all * DV + row * (places * DV) + column, acc, mask=(row < most_rows) & (column < DV))
    gl.store(sums + 2 * places * rows, row_max, mask=rows < most_rows)
    gl.store(sums + 2 * places * rows + 1, row_sum, mask=rows < most_rows)


@gluon.jit
def _write_output(
    out_base, lse_base, sinks, row_max, row_sum, acc, batch, head_kv, heads_kv, most_rows,
    stride_ob, stride_oh, stride_om, stride_lse, GROUP: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Write the output and the log-sum-exp of rows that no other piece has a part of. ``batch`` has 64 bits."""
    of_out: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], row_max.type.layout)
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, of_out)), 1)
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, of_out)), 0)
    if sinks is not None:
        sink = gl.load(sinks + head_kv * GROUP + rows % GROUP)
        row_max, row_sum, rescale = with_sink(sink, row_max, row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, of_out)), 1)
    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    inverse = gl.convert_layout(1.0 / gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, of_out))
    acc = acc * gl.expand_dims(inverse, 1)
    out_tile = out_base + batch * stride_ob + head_kv.to(gl.int64) * GROUP * stride_oh
    places = (row % GROUP) * stride_oh + (row // GROUP) * stride_om
    gl.store(out_tile + places + column, acc.to(out_base.dtype.element_ty), mask=(row < most_rows) & (column < DV))
    if lse_base is not None:
        lse_rows = (batch * heads_kv * GROUP + head_kv * GROUP + rows % GROUP) * stride_lse + rows // GROUP
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        gl.store(lse_base + lse_rows, (shift + log2_of_sum(row_sum)) * 0.6931471805599453, mask=rows < most_rows)
