"""Experts' weights into a format and out of it, gates and ups as ``fused_moe`` has them."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.formats import Weights, columns_of, dequantized, quantized
from flashmoe_science.ops.moe.call.formats import check_codes, check_scale, checked_format, codes_of, format_named, scale_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_format(
    gate_up_proj: torch.Tensor, down_proj: torch.Tensor, weight_format: str, interleaved: bool, powers: bool
) -> dict[str, Any]:
    """The arguments of ``fused_moe`` that are the weights. Raises as ``quantize_experts``."""
    form = format_named(weight_format)
    for name, one in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if not isinstance(one, torch.Tensor) or one.dtype not in _DTYPES or one.dim() != 3:
            raise TypeError(f"{name} must be a tensor [E, N, K] of bfloat16, float16 or float32")
        if form.group and one.shape[2] % form.group:
            raise ValueError(f"{name} has {one.shape[2]} columns; {form.name} needs a multiple of {form.group}")
    if powers and not form.in_blocks:
        raise ValueError(f"powers is True and weight_format is {weight_format!r}; it must be one of fp8 blocks then")
    halves = _halves(gate_up_proj.shape[1], down_proj.shape[2], interleaved) and form.in_blocks
    first = quantized(gate_up_proj.detach(), form, halves, powers)
    second = quantized(down_proj.detach(), form, powers=powers)
    return {
        "gate_up_proj": first.codes, "gate_up_scale": first.scale, "down_proj": second.codes, "down_scale": second.scale,
        "weight_format": weight_format,
    }  # fmt: skip


def out_of_format(
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    weight_format: str,
    interleaved: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights. Raises as ``dequantize_experts``."""
    form = format_named(weight_format)
    checked_format(weight_format, (gate_up_scale, down_scale), transposed=False)
    check_codes("gate_up_proj", gate_up_proj, form)
    check_codes("down_proj", down_proj, form)
    first, second = codes_of(gate_up_proj), codes_of(down_proj)
    halves = _halves(first.shape[1], columns_of(second), interleaved)
    check_scale("gate_up_scale", gate_up_scale, first, form, halves)
    check_scale("down_scale", down_scale, second, form, halves=False)
    of_first, of_second = (scale_of(one, weight_format) for one in (gate_up_scale, down_scale))
    return dequantized(Weights(first, of_first), dtype, halves), dequantized(Weights(second, of_second), dtype)


def _halves(rows: int, width: int, interleaved: bool) -> bool:
    return rows == 2 * width and not interleaved
