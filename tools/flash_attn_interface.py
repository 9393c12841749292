"""FlashAttention-3's module by this package, for its own tests: PYTHONPATH=tools pytest hopper/test_flash_attn.py."""

from flashmoe_science.integrations.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
