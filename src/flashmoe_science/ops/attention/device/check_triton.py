"""Whether lengths, pages and rotary positions on a GPU can be, by one launch, for FLASHMOE_CHECK=1.

``call/lengths.py`` has the words. Not specialised on any size: it is no kernel for speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.attention.call.lengths import Lengths
from flashmoe_science.ops.attention.device.sequences import packed_rows
from flashmoe_science.ops.calls import device_guard

_NO_LIMIT = 2**31 - 1
_SIZES = (
    "stride_table", "pages", "tokens_q", "longest_q", "tokens_k", "longest_k", "capacity", "page", "caches", "positions", "new",
    "queries",
)  # fmt: skip


@triton.jit
def _rows(cu_seqlens, n, rows, total, longest):
    """(rows of a sequence int64, whether it is not within ``total`` or is longer than ``longest``)."""
    first, rows = packed_rows(cu_seqlens, n, tl.cast(rows, tl.int64))
    wrong = False
    if cu_seqlens is not None:
        first = first.to(tl.int64)
        rows = tl.load(cu_seqlens + n + 1).to(tl.int64) - first
        wrong = (first < 0) | ((n == 0) & (first != 0)) | (rows < 0) | (rows > longest) | (first + rows > total)
    return rows, wrong


@triton.jit(do_not_specialize=_SIZES)
def flashmoe_check_triton(
    wrong_base, cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpad, cu_seqlens_new, rotary_seqlens,
    stride_table, pages, tokens_q, longest_q, tokens_k, longest_k, capacity, page, caches, positions, new, queries,
    ONE_POSITION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write 1 for a sequence, a program each, that is not within what there is; else 0."""
    n = tl.program_id(0)
    turned, wrong = _rows(cu_seqlens_q, n, queries, tokens_q, longest_q)
    held_most, wrong_k = _rows(cu_seqlens_k, n, tl.minimum(capacity, longest_k), tokens_k, longest_k)
    added, wrong_new = _rows(cu_seqlens_new, n, new, new, new)
    wrong = wrong | wrong_k | wrong_new
    if cache_batch_idx is not None:
        row = tl.load(cache_batch_idx + n)
        wrong = wrong | (row < 0) | (row >= caches)
    if leftpad is not None:
        pad = tl.load(leftpad + n)
        wrong = wrong | (pad < 0) | (pad > capacity)
    if cache_seqlens is not None:
        held = tl.load(cache_seqlens + n).to(tl.int64)
        wrong = wrong | (held < 0) | (held + added > held_most)
        if page_table is not None:
            used = tl.minimum(tl.cdiv(held + added, page), pages)
            for first in range(0, used, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                entry = tl.load(page_table + n.to(tl.int64) * stride_table + columns, mask=columns < used, other=0)
                wrong = wrong | (tl.max(((entry < 0) | (entry >= caches)).to(tl.int32), 0) > 0)
        if positions > 0:
            first = held
            if rotary_seqlens is not None:
                first = tl.load(rotary_seqlens + n).to(tl.int64)
            if ONE_POSITION:
                turned = tl.minimum(turned, 1)
            wrong = wrong | (first < 0) | (first > positions) | (first + tl.maximum(added, turned) > positions)
    tl.store(wrong_base + n, wrong.to(tl.int32))


def is_wrong(one: Lengths) -> bool:
    """Whether ``check_lengths`` would refuse them. Waits for the GPU."""
    given = one.given()[0]
    starts = next((starts for starts in (one.cu_seqlens_q, one.cu_seqlens_k) if starts is not None), None)
    batch = given.shape[0] if starts is None else starts.shape[0] - 1
    if batch == 0:
        return False
    wrong = torch.empty(batch, dtype=torch.int32, device=given.device)
    stride, pages = (0, 0) if one.page_table is None else (one.page_table.stride(0), one.page_table.shape[1])
    longest_q, longest_k = (_NO_LIMIT if most is None else most for most in (one.longest_q, one.longest_k))
    launch = device_guard(given.get_device())(flashmoe_check_triton[(batch,)])
    launch(
        wrong, *one[:8], stride, pages, one.tokens_q, longest_q, one.tokens_k, longest_k, one.capacity, one.page, one.caches,
        one.positions, one.new, one.queries, one.one_position, 1024,
    )  # fmt: skip
    return any(wrong.tolist())
