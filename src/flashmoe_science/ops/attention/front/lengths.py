"""Where lengths, pages and rotary positions are refused by their values: on the CPU, where reading them costs nothing."""

from __future__ import annotations

import torch

from flashmoe_science.ops.attention.call.lengths import Lengths, check_lengths
from flashmoe_science.ops.calls import is_plain


def refuse_lengths(one: Lengths) -> None:
    """Raise ValueError where a sequence does not lie within what there is, as far as values may be read: on a GPU, and while
    a tracer looks on, they may not."""
    given = one.given()
    if given and not torch.compiler.is_compiling() and given[0].device.type == "cpu" and is_plain(*given):
        check_lengths(one)
