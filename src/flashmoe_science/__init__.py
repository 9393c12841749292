"""Fast exact attention for PyTorch, each kernel carrying its proof. See README.md."""

from flashmoe_science.attention import (
    explain,
    flash_attention_forward,
    flash_attention_science,
    flash_attn_func,
    scaled_dot_product_attention,
)

__all__ = [
    "explain",
    "flash_attention_forward",
    "flash_attention_science",
    "flash_attn_func",
    "scaled_dot_product_attention",
]
