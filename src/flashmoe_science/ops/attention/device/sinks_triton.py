"""The gradient of the sinks: a sink's logit has probability exp(sink - lse) in each row, and no value, so that it is the sum of
-exp(sink - lse) delta over the rows of its head."""

from __future__ import annotations

import triton
import triton.language as tl

PARTS_AT_ONCE = 128  # partials that are added at a time
SINKS_WARPS = 4


@triton.jit
def sink_gradient(sinks, head, lse, delta):
    """What rows, of which a log-sum-exp of +-inf says that they are not there, add to the gradient of their head's sink."""
    sink = tl.load(sinks + head).to(tl.float32)
    p = tl.exp2((sink - lse) * 1.4426950408889634)
    return tl.sum(tl.where(lse == float("-inf"), 0.0, -p * delta), 0)  # -inf: the sink is too


@triton.jit(do_not_specialize=("parts",))
def flashmoe_bwd_dsinks_triton(partials, dsinks, parts, BLOCK: tl.constexpr):
    """The gradient of a head's sink: its partials in their order."""
    head, place = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        at = first + place
        total += tl.load(partials + tl.cast(head, tl.int64) * parts + at, mask=at < parts, other=0.0)
    tl.store(dsinks + head, tl.sum(total, 0).to(dsinks.dtype.element_ty))
