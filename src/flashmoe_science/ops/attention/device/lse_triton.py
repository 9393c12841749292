"""A row's log-sum-exp in Triton: from its maximum and its sum, with an attention sink; and where the log-sum-exp is stored."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.forward.tiled_triton import log2_of_sum


@triton.jit
def with_sink(sink, row_max, row_sum):
    """The maximum and the sum with a logit more, and by what to scale what was summed before."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    return new_max, row_sum * rescale + tl.exp2(sink - shift), rescale


@triton.jit
def log_sum_exp(row_max, row_sum):
    """Natural logarithm; -inf for an empty sum."""
    return (tl.where(row_max == float("-inf"), 0.0, row_max) + log2_of_sum(row_sum)) * 0.6931471805599453


@triton.jit
def lse_rows(batch, head, query, heads, stride, cu_seqlens_q):
    """Where the log-sum-exp of a row lies in [batch, heads, seqlen_q], or of packed queries in [heads, total_q]."""
    if cu_seqlens_q is not None:
        return head * stride + query
    return (batch * heads + head) * stride + query
