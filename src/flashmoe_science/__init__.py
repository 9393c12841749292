"""Fast exact attention and mixture-of-experts kernels for PyTorch. See README.md."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from flashmoe_science.ahead import warmup as warmup
    from flashmoe_science.attention import explain as explain
    from flashmoe_science.attention import flash_attention_forward as flash_attention_forward
    from flashmoe_science.attention import flash_attention_science as flash_attention_science
    from flashmoe_science.attention import flash_attn_func as flash_attn_func
    from flashmoe_science.attention import merge_attention as merge_attention
    from flashmoe_science.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from flashmoe_science.checkpointing import checkpoint_context as checkpoint_context
    from flashmoe_science.moe import balance_loss as balance_loss
    from flashmoe_science.moe import dequantize_experts as dequantize_experts
    from flashmoe_science.moe import expert_load as expert_load
    from flashmoe_science.moe import fused_moe as fused_moe
    from flashmoe_science.moe import grouped_moe as grouped_moe
    from flashmoe_science.moe import quantize_experts as quantize_experts
    from flashmoe_science.moe import repack_experts as repack_experts
    from flashmoe_science.moe import route as route
    from flashmoe_science.moe import z_loss as z_loss
    from flashmoe_science.nn import FlashMoELayer as FlashMoELayer
    from flashmoe_science.packed import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from flashmoe_science.packed import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from flashmoe_science.packed import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
    from flashmoe_science.packed import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
    from flashmoe_science.serving import flash_attn_varlen_func as flash_attn_varlen_func
    from flashmoe_science.serving import flash_attn_with_kvcache as flash_attn_with_kvcache

    __version__: str

_MODULES = {  # of each public name
    "FlashMoELayer": "nn",
    "balance_loss": "moe",
    "checkpoint_context": "checkpointing",
    "dequantize_experts": "moe",
    "expert_load": "moe",
    "explain": "attention",
    "flash_attention_forward": "attention",
    "flash_attention_science": "attention",
    "flash_attn_func": "attention",
    "flash_attn_kvpacked_func": "packed",
    "flash_attn_qkvpacked_func": "packed",
    "flash_attn_varlen_func": "serving",
    "flash_attn_varlen_kvpacked_func": "packed",
    "flash_attn_varlen_qkvpacked_func": "packed",
    "flash_attn_with_kvcache": "serving",
    "fused_moe": "moe",
    "grouped_moe": "moe",
    "merge_attention": "attention",
    "quantize_experts": "moe",
    "repack_experts": "moe",
    "route": "moe",
    "scaled_dot_product_attention": "attention",
    "warmup": "ahead",
    "z_loss": "moe",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> _typing.Any:
    """Import the functions, and torch with them, on first use: the judge and the command's help run without torch."""
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("flashmoe-science")
    elif name in _MODULES:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
