"""Experts' weights in a format, as a call is given them: the checks that refuse bad ones, and the views that kernels take.

A checkpoint's tensors stay as they lie. Codes of mxfp4 may be bytes of either sign, and split into blocks of 16 as gpt-oss has
them; e8m0 scales may be given as such or as bytes, those of channels with a last dimension of 1 or without, one of a matrix
too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashmoe_science.formats import FORMATS, Format
from flashmoe_science.ops.formats import columns_of

_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
_E4M3, _INT4, _FLOATS = (torch.float8_e4m3fn,), (torch.int32,), (torch.float32, torch.bfloat16, torch.float16)
_CODES = {
    "mxfp4": _BYTES, "fp8_block": _E4M3, "fp8_block_w8a8": _E4M3, "fp8_channel": _E4M3, "int4_g32": _INT4, "int4_g128": _INT4,
}  # fmt: skip
_SCALES = {
    "mxfp4": _E8M0, "fp8_block": (torch.float32, *_E8M0), "fp8_block_w8a8": (torch.float32, *_E8M0),
    "fp8_channel": _FLOATS[:2], "int4_g32": _FLOATS, "int4_g128": _FLOATS,
}  # fmt: skip
_IN_BLOCKS = 16  # bytes of a block of mxfp4, gpt-oss's last dimension


def format_named(name: object) -> Format:
    """The format. Raises ValueError where none has the name."""
    if name not in FORMATS:
        raise ValueError(f"weight_format is {name!r}; it must be one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[str(name)]


def checked_format(weight_format: object, scales: tuple[object, object], transposed: bool) -> Format | None:
    """The format of a call's weights; None of weights of the dtype of x.

    Raises:
        ValueError: no format, one without both scales or for weights that are ``transposed``, scales without a format.
    """
    for name, scale in zip(("gate_up_scale", "down_scale"), scales, strict=True):
        if (scale is None) != (weight_format is None):
            given = "None" if scale is None else "given"
            raise ValueError(f"weight_format is {weight_format!r} and {name} is {given}; a format and both scales go together")
    if weight_format is None:
        return None
    if weight_format not in FORMATS:
        raise ValueError(f"weight_format is {weight_format!r}; it must be None or one of {', '.join(map(repr, FORMATS))}")
    if transposed:
        raise ValueError(f"transposed is True and weight_format is {weight_format!r}; it must be False then")
    return FORMATS[weight_format]


def check_codes(name: str, codes: torch.Tensor, form: Format) -> None:
    """Raise unless a tensor has codes of the format, [E, N, K] of them."""
    if codes.dtype not in _CODES[form.name]:
        raise TypeError(f"{name} has dtype {codes.dtype} and weight_format is {form.name!r}; it must be {_any(_CODES, form)}")
    in_blocks = form.name == "mxfp4" and codes.dim() == 4
    if codes.dim() != 3 and not (in_blocks and codes.shape[3] == _IN_BLOCKS):
        allowed = {4: "[E, N, K / 2] or [E, N, K / 32, 16]", 32: "[E, N, K / 8]", 8: "[E, N, K]"}
        key = 4 if form.name == "mxfp4" else 8 * codes.element_size()
        raise ValueError(f"{name} has shape {tuple(codes.shape)}; it must be {allowed[key]}")
    if 0 in codes.shape:
        raise ValueError(f"{name} has shape {tuple(codes.shape)}; no size of it may be 0")
    if in_blocks and codes.shape[2] > 1 and codes.stride(2) != _IN_BLOCKS * codes.stride(3):
        raise ValueError(f"{name} has strides {codes.stride()}; the blocks of a row must follow each other")
    if form.name == "mxfp4" and not in_blocks and codes.shape[2] % _IN_BLOCKS:
        raise ValueError(f"{name} has {codes.shape[2]} bytes a row; they must be a multiple of 16, of blocks of 32 codes")
    if form.group and codes.dtype == torch.int32 and columns_of(codes) % form.group:
        raise ValueError(f"{name} has {columns_of(codes)} columns; {form.name} needs a multiple of {form.group}")
    if codes.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; weights in a format have none")


def check_scale(name: str, scale: torch.Tensor, codes: torch.Tensor, form: Format, halves: bool) -> None:
    """Raise unless it is the scales of codes [E, N, K], as ``codes_of`` gives them. ``halves``: of gates, then ups."""
    if scale.dtype not in _SCALES[form.name]:
        raise TypeError(f"{name} has dtype {scale.dtype} and weight_format is {form.name!r}; it must be {_any(_SCALES, form)}")
    allowed = _shapes(codes, form, halves)
    if not any(scale.shape == one for one in allowed):
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be {', or '.join(str(list(one)) for one in allowed)}")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; weights in a format have none")


def _shapes(codes: torch.Tensor, form: Format, halves: bool) -> list[tuple[int, ...]]:
    """The shapes that the scales of codes may have."""
    (experts, rows), (high, wide) = codes.shape[:2], form.block
    if wide is None:
        of_all, of_halves = [(experts,), (experts, 1), (experts, 1, 1)], [(experts, 2)] if halves else []
        return [(experts, rows, 1), (experts, rows), *of_all, *of_halves]
    columns = -(-columns_of(codes) // wide)
    as_one = experts, -(-rows // high), columns
    return [as_one, (experts, 2 * -(-rows // 2 // high), columns)] if halves and form.in_blocks else [as_one]


def codes_of(codes: torch.Tensor) -> torch.Tensor:
    """Codes that have been checked as ``ops.formats`` takes them: no copy."""
    codes = codes.flatten(2) if codes.dim() == 4 else codes
    return codes.view(torch.uint8) if codes.dtype in _BYTES else codes


def scale_of(scale: torch.Tensor, weight_format: str | None) -> torch.Tensor:
    """Scales that have been checked as ``ops.formats`` takes them: no copy."""
    if weight_format == "fp8_channel":
        return scale.squeeze(2) if scale.dim() == 3 else scale[:, None] if scale.dim() == 1 else scale
    return scale.view(torch.uint8) if scale.dtype in _E8M0 else scale


def _any(dtypes: dict[str, tuple[torch.dtype, ...]], form: Format) -> str:
    name: Callable[[torch.dtype], str] = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731
    return " or ".join(map(name, dtypes[form.name]))
