"""A kernel's results in Triton: O from unscaled sums, and where the log-sum-exp of a row is stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalized(acc, row_sum):
    """O from the unscaled output and the sums of its rows. A row that sees no key has a sum of 0: its output is 0 and its
    log-sum-exp log(0) = -inf."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def lse_rows(batch, head, query, heads, stride, cu_seqlens_q):
    """Where the log-sum-exp of a row lies in [batch, heads, seqlen_q], or of packed queries in [heads, total_q]. ``stride``:
    from a head to the next."""
    if cu_seqlens_q is not None:
        return head * stride + query
    return (batch * heads + head) * stride + query
