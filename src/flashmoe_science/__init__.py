"""Fast exact attention and mixture-of-experts kernels for PyTorch, each carrying its proof. See README.md."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from flashmoe_science.attention import (
        explain,
        flash_attention_forward,
        flash_attention_science,
        flash_attn_func,
        merge_attention,
        scaled_dot_product_attention,
    )
    from flashmoe_science.moe import balance_loss, expert_load, explain_moe, fused_moe, route
    from flashmoe_science.nn import FlashMoELayer
    from flashmoe_science.packed import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from flashmoe_science.serving import flash_attn_varlen_func, flash_attn_with_kvcache

    __version__: str

_ATTENTION = (
    "explain",
    "flash_attention_forward",
    "flash_attention_science",
    "flash_attn_func",
    "merge_attention",
    "scaled_dot_product_attention",
)
_MOE = ("balance_loss", "expert_load", "explain_moe", "fused_moe", "route")
_PACKED = (
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
_SERVING = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
_HOMES = (
    dict.fromkeys(_ATTENTION, "attention")
    | dict.fromkeys(_PACKED, "packed")
    | dict.fromkeys(_SERVING, "serving")
    | dict.fromkeys(_MOE, "moe")
    | {"FlashMoELayer": "nn"}
)

__all__ = [
    "FlashMoELayer",
    "balance_loss",
    "expert_load",
    "explain",
    "explain_moe",
    "flash_attention_forward",
    "flash_attention_science",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fused_moe",
    "merge_attention",
    "route",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> _typing.Any:
    """Import the functions, and torch with them, on first use: the judge and the command's help run without torch."""
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("flashmoe-science")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
