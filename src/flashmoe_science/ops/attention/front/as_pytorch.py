"""What ``scaled_dot_product_attention`` does beside calls of our kernels: autocast, and PyTorch's own function."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.spec import (
    Names,
    Unserved,
    check_mask_argument,
    check_probability,
    check_tensors,
    checked_scale,
)
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH

TORCH_NAMES = Names("query", "key", "value", "scale")


def by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    refusal: Unserved | None,
) -> torch.Tensor:
    """PyTorch's own function. What it refuses is refused in our words, where they say what is wrong (``refusal``: if found)."""
    if kernel is not None:
        _check_kernel(kernel, attn_mask, dropout_p, refusal)
    if scale is not None:
        scale = checked_scale(scale, "scale")
    try:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if refusal is not None:
            raise refusal from error
        check_tensors(query, key, value, TORCH_NAMES)
        if attn_mask is not None:
            check_mask_argument(attn_mask, query, key, TORCH_NAMES)
        check_probability(dropout_p, "dropout_p")
        raise


def _check_kernel(kernel: str, attn_mask: torch.Tensor | None, dropout_p: float, refusal: Unserved | None) -> None:
    from flashmoe_science.operations import kernel_named  # it brings Triton: not at import

    if kernel_named(kernel).name == PYTORCH:
        return
    if refusal is not None:
        raise refusal
    argument = "dropout_p" if attn_mask is None or dropout_p != 0.0 else "attn_mask"
    raise CannotServe(f"kernel {kernel!r} takes no {argument}; {PYTORCH!r} does")


def explain_by_pytorch(
    tensors: tuple[torch.Tensor | None, ...],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    refusal: Unserved | None,
    reason: str,
) -> Decision:
    """The Decision for PyTorch's own function of (query, key, value, attn_mask). Raises what it would, without computing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v, mask = (mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in tensors)
        by_pytorch(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, kernel, refusal)  # type: ignore[arg-type]
    return Decision(PYTORCH, Config(), reason, "required")


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast as PyTorch's own function does under torch.autocast: floating tensors other than fp64 to the autocast dtype."""
    cast_tensors = []
    for tensor in tensors:
        eligible = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        if eligible and torch.is_autocast_enabled(tensor.device.type):
            tensor = tensor.to(torch.get_autocast_dtype(tensor.device.type))
        cast_tensors.append(tensor)
    return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", tuple(cast_tensors))
