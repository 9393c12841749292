"""Page look-up: where rows of a sequence lie in a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_of(table, row, inside, other, PAGE: tl.constexpr):
    """The pages of rows of a sequence by its row of the page table; ``other`` where not ``inside``: an entry past a sequence's
    length is never read, as it may be anything."""
    return tl.load(table + row // PAGE, mask=inside, other=other)
