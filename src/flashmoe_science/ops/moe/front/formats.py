"""Experts' weights into a format and out of it, laid out as ``fused_moe`` takes them; and from GPTQ's and AWQ's layouts."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from flashmoe_science.ops.formats import Weights, columns_of, dequantized, packed, quantized, unpacked
from flashmoe_science.ops.moe.call.formats import (
    OF_WEIGHTS,
    check_codes,
    check_flags,
    check_projections,
    check_scale,
    check_tensor,
    check_zero_point,
    checked_format,
    codes_of,
    format_named,
    scale_of,
    sizes_of,
)

Layout = Literal["gptq", "gptq_v2", "awq"]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LESS_ONE = 0x11111111  # what GPTQ's first version subtracts from eight zero points
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each column in AWQ's words


def in_format(
    gate_up_proj: torch.Tensor, down_proj: torch.Tensor, weight_format: str, interleaved: bool, powers: bool
) -> dict[str, Any]:
    """The arguments of ``fused_moe`` that are the weights. Raises as ``quantize_experts``."""
    form = format_named(weight_format)
    if form.static:
        raise ValueError(
            f"weight_format is {weight_format!r}, whose input scales are a checkpoint's; it must be 'fp8_channel' here"
        )
    for name, one in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        check_tensor(name, one, "gate_up_proj", gate_up_proj)
        _check_stacked(name, one, _DTYPES)
        if form.group and one.shape[2] % form.group:
            raise ValueError(f"{name} has {one.shape[2]} columns; {form.name} needs a multiple of {form.group}")
    check_projections(sizes_of(gate_up_proj), sizes_of(down_proj))
    check_flags(interleaved=interleaved, powers=powers)
    if powers and not form.in_blocks:
        raise ValueError(f"powers is True and weight_format is {weight_format!r}; it must be one of fp8 blocks then")
    halves = _halves(gate_up_proj.shape[1], down_proj.shape[2], interleaved) and form.in_blocks
    first = quantized(gate_up_proj.detach(), form, halves, powers)
    return _arguments(first, quantized(down_proj.detach(), form, powers=powers), weight_format)


def out_of_format(
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    of_weights: dict[str, Any],
    weight_format: str,
    interleaved: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights. ``of_weights``: the arguments of OF_WEIGHTS. Raises as ``dequantize_experts``."""
    form = format_named(weight_format)
    checked_format(weight_format, of_weights, transposed=False)
    given = {name: one for name, one in of_weights.items() if one is not None}
    for name, one in {"gate_up_proj": gate_up_proj, "down_proj": down_proj, **given}.items():
        check_tensor(name, one, "gate_up_proj", gate_up_proj)
    check_codes("gate_up_proj", gate_up_proj, form)
    check_codes("down_proj", down_proj, form)
    check_flags(interleaved=interleaved)
    if dtype not in (*_DTYPES, torch.float64):
        raise TypeError(f"dtype is {dtype!r}; it must be bfloat16, float16, float32 or float64")
    both = codes_of(gate_up_proj), codes_of(down_proj)
    check_projections(sizes_of(both[0]), sizes_of(both[1]))
    halves, made = _halves(both[0].shape[1], columns_of(both[1]), interleaved), []
    for name, codes, split in zip(("gate_up", "down"), both, (halves, False), strict=True):
        scale, zero_point = (of_weights[f"{name}_{part}"] for part in ("scale", "zero_point"))
        check_scale(f"{name}_scale", scale, codes, form, split)
        if form.zero_bits:
            check_zero_point(f"{name}_zero_point", zero_point, codes, form)
        made.append(dequantized(Weights(codes, scale_of(scale, weight_format), zero_point), dtype, split))
    return made[0], made[1]


def out_of_layout(layout: Layout, gate_up: tuple[Any, ...], down: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of ``fused_moe`` that are the weights, of (qweight, scales, qzeros, g_idx) of each projection. Raises as
    ``repack_experts``."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, get_args(Layout)))}")
    made = [_checked_layout(name, layout, one) for name, one in (("gate_up", gate_up), ("down", down))]
    groups, sizes = zip(*made, strict=True)
    check_projections(*sizes)
    group = 32 if any(one % 128 for one in groups) else 128
    first, second = (_repacked(layout, one // group, *given[:3]) for one, given in zip(groups, (gate_up, down), strict=True))
    eight = packed(torch.full((8,), 8, device=first.codes.device))
    if all(one.zero_point is None or bool((one.zero_point == eight).all()) for one in (first, second)):
        return _arguments(first._replace(zero_point=None), second._replace(zero_point=None), f"int4_g{group}")
    return _arguments(first, second, f"int4_g{group}_zero")


def _check_stacked(name: str, one: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless it has three dimensions, none of them 0, and one of the dtypes."""
    if one.dtype not in dtypes:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} has dtype {one.dtype}; it must be {words}")
    if one.dim() != 3:
        raise ValueError(f"{name} has shape {tuple(one.shape)}; it must have three dimensions, experts first")
    if 0 in one.shape:
        raise ValueError(f"{name} has shape {tuple(one.shape)}; no size of it may be 0")


def _checked_layout(name: str, layout: Layout, given: tuple[Any, ...]) -> tuple[int, tuple[int, int, int]]:
    """How many rows share a scale; experts, rows and columns of the weights [E, N, K]."""
    qweight, scales, qzeros, g_idx = given
    for what, one, dtypes in (
        ("qweight", qweight, (torch.int32,)), ("scales", scales, _DTYPES), ("qzeros", qzeros, (torch.int32,))
    ):  # fmt: skip
        check_tensor(f"{name}_{what}", one, f"{name}_qweight", qweight)
        _check_stacked(f"{name}_{what}", one, dtypes)
    experts, rows, columns = qweight.shape
    rows, columns = (rows, 8 * columns) if layout == "awq" else (8 * rows, columns)
    count = scales.shape[1]
    group: int = rows // count
    if rows % count or group % 32:
        raise ValueError(f"{name}_scales has {count} rows to {rows} of weights; it must have one to a multiple of 32")
    for what, one, shape in (("scales", scales, (experts, count, columns)), ("qzeros", qzeros, (experts, count, columns // 8))):
        if tuple(one.shape) != shape or columns % 8:
            raise ValueError(f"{name}_{what} has shape {tuple(one.shape)}; it must be {list(shape)}, columns a multiple of 8")
    if g_idx is not None:
        check_tensor(f"{name}_g_idx", g_idx, f"{name}_qweight", qweight)
        if tuple(g_idx.shape) != (experts, rows):
            raise ValueError(
                f"{name}_g_idx has shape {tuple(g_idx.shape)}; it must be {[experts, rows]}, the group of each row"
            )
        if not torch.equal(g_idx.cpu().long(), (torch.arange(rows, device="cpu") // group).expand(experts, -1)):
            raise ValueError(f"{name}_g_idx is of another order (desc_act); it must be row // {group} of every expert, or None")
    return group, (experts, columns, rows)


def _repacked(layout: Layout, parts: int, qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> Weights:
    """Codes, scales and zero points along the rows of [E, N, K], by expert; each group becomes ``parts``."""
    codes = qweight.new_empty(qweight.shape[0], scales.shape[2], qweight.numel() // qweight.shape[0] // scales.shape[2])
    for made, words in zip(codes, qweight, strict=True):
        made.copy_(packed(_of_awq(words).mT) if layout == "awq" else words.mT)
    if layout == "awq":
        qzeros = packed(_of_awq(qzeros))
    elif layout == "gptq":
        qzeros = qzeros + _LESS_ONE
    return Weights(codes, *(one.mT.contiguous().repeat_interleave(parts, -1) for one in (scales, qzeros)))


def _of_awq(words: torch.Tensor) -> torch.Tensor:
    """The integers [..., N] of AWQ's words [..., N / 8]."""
    by_place: torch.Tensor = unpacked(words).unflatten(-1, (-1, 8))
    return by_place[..., _AWQ].flatten(-2)


def _arguments(first: Weights, second: Weights, weight_format: str) -> dict[str, Any]:
    of_weights = zip(OF_WEIGHTS, (first.scale, second.scale, first.zero_point, second.zero_point), strict=True)
    given = {name: one for name, one in of_weights if one is not None}
    return {"gate_up_proj": first.codes, "down_proj": second.codes, **given, "weight_format": weight_format}


def _halves(rows: int, width: int, interleaved: bool) -> bool:
    return rows == 2 * width and not interleaved
