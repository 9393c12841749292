"""Where lengths, pages and rotary positions are refused by their values: on the CPU, where reading them costs nothing."""

from __future__ import annotations

import torch

from flashmoe_science.ops.attention.call.lengths import Lengths, check_lengths
from flashmoe_science.ops.calls import is_plain


def are_readable(*tensors: torch.Tensor | None) -> bool:
    """Whether values may be read: they are on the CPU, and nothing traces the call."""
    return (
        not torch.compiler.is_compiling()
        and all(one is None or one.device.type == "cpu" for one in tensors)
        and is_plain(*tensors)
    )


def refuse_lengths(one: Lengths) -> None:
    """Raise ValueError where a sequence does not lie within what there is, as far as that may be read."""
    if are_readable(*one.given()):
        check_lengths(one)
