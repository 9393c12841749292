"""What an attention call computes: sizes (problem.py), features such as windows (features.py), lengths (lengths.py)."""

from flashmoe_science.ops.attention.problem.problem import (
    KEY_CLASS,
    MAX_HEAD_DIM,
    AttentionProblem,
    Layout,
    Mask,
    head_parts,
    length_class,
    padded_head_dim,
    parse,
    tile_rows,
)

__all__ = [
    "KEY_CLASS",
    "MAX_HEAD_DIM",
    "AttentionProblem",
    "Layout",
    "Mask",
    "head_parts",
    "length_class",
    "padded_head_dim",
    "parse",
    "tile_rows",
]
