"""Fast exact attention for PyTorch, each kernel carrying its proof. See README.md."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from flashmoe_science.attention import (
        explain,
        flash_attention_forward,
        flash_attention_science,
        flash_attn_func,
        scaled_dot_product_attention,
    )

    __version__: str

__all__ = [
    "explain",
    "flash_attention_forward",
    "flash_attention_science",
    "flash_attn_func",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> _typing.Any:
    """Import the functions, and torch with them, on first use: the judge and the command's help run without torch."""
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("flashmoe-science")
    elif name in __all__:
        from flashmoe_science import attention

        value = getattr(attention, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
