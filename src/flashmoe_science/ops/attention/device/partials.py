"""Layout of partial results: what programs that split a row's keys leave to the merge."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Partials(NamedTuple):
    """Unscaled outputs [rows, slots, Dv], then maxima and sums [rows, slots, 2], then, with stream-K, the first slot and the
    number of splits of each sequence [batch, 2]; all fp32 in one buffer. A split without keys has a sum of 0, and its output is
    not written."""

    base: tl.tensor
    rows: tl.tensor
    slots: tl.tensor


@triton.jit
def sums_at(partials, slot, DV: tl.constexpr):
    """Where the maximum and the sum lie of which the output is at ``base + slot * DV``. ``slot`` counts all rows' slots, in 64
    bits."""
    return partials.base + tl.cast(partials.rows, tl.int64) * partials.slots * DV + 2 * slot


@triton.jit
def split_info_at(partials, batch, DV: tl.constexpr):
    """Where the first slot of a sequence and its number of splits lie."""
    return partials.base + tl.cast(partials.rows, tl.int64) * partials.slots * (DV + 2) + 2 * batch


@triton.jit
def store_sums(sums, row_max, row_sum, row_ok):
    """Store the maxima and sums of rows."""
    tl.store(sums, row_max, mask=row_ok)
    tl.store(sums + 1, row_sum, mask=row_ok)
