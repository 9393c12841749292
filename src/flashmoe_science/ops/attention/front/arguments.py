"""The arguments that both operators of attention have, in the order of their schemas."""

from __future__ import annotations

from typing import Any

from flashmoe_science.ops.attention.call.checks import checked_scale
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.problem import Mask

FEATURES = Tensors._fields[3:15]
SCHEMA_OF_FEATURES = (
    "".join(f"Tensor? {name}=None, " for name in FEATURES)
    + "int? window_left=None, int? window_right=None, float softcap=0.0, int num_splits=0, SymInt max_seqlen_q=0, "
    "SymInt max_seqlen_k=0, bool deterministic=False"
)


def of_features(tensors: Tensors, options: Options) -> tuple[Any, ...]:
    """The arguments of SCHEMA_OF_FEATURES."""
    o = options
    sizes = (o.window_left, o.window_right, o.softcap, o.num_splits, o.max_seqlen_q, o.max_seqlen_k, o.deterministic)
    return (*tensors.of_features(), *sizes)


def unpacked(
    qkv: tuple[Any, ...],
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel_name: str | None = None,
    *rest: Any,
) -> tuple[Tensors, Options, float | None]:
    """What an operator's arguments are; ``rest``: those of SCHEMA_OF_FEATURES, or the first of them."""
    scale, count = checked_scale(softmax_scale, "softmax_scale"), len(FEATURES)
    return Tensors(*qkv, *rest[:count]), Options(mask, return_lse, kernel_name, *rest[count:]), scale
