"""Experts' weights in a format, as a call is given them: the checks that refuse bad ones, and the views that kernels take.

A checkpoint's tensors are taken as they are. mxfp4 codes may be signed or unsigned bytes, also in blocks of 16 as in gpt-oss;
e8m0 scales may be e8m0 or bytes; scales of channels and of a matrix may end in a dimension of 1 or not. Zero points are packed
along the rows, as in compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flashmoe_science.formats import FORMATS, Format
from flashmoe_science.ops.checks import check_device, check_flag, checked_tensor
from flashmoe_science.ops.formats import columns_of
from flashmoe_science.printable import shown

_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
_E4M3, _INT4, _FLOATS = (torch.float8_e4m3fn,), (torch.int32,), (torch.float32, torch.bfloat16, torch.float16)
_OF_INT4 = tuple(name for name in FORMATS if name.startswith("int4"))
_OF_BLOCKS = tuple(name for name, form in FORMATS.items() if form.in_blocks)
_CODES: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(FORMATS, _E4M3) | dict.fromkeys(_OF_INT4, _INT4) | {"mxfp4": _BYTES}
_SCALES: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(FORMATS, _FLOATS) | {"mxfp4": _E8M0}
_SCALES |= dict.fromkeys(_OF_BLOCKS, (*_FLOATS, *_E8M0))
OF_WEIGHTS = ("gate_up_scale", "down_scale", "gate_up_zero_point", "down_zero_point")  # what a format has besides codes
OF_FORMAT = (*OF_WEIGHTS, "gate_up_input_scale", "down_input_scale")  # and the scales of what weights are multiplied by
_IN_BLOCKS = 16  # bytes of a block of mxfp4, gpt-oss's last dimension


def format_named(name: object, none: str = "") -> Format:
    """The format; ``none`` says what else is allowed. Raises ValueError: an unknown name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"weight_format is {shown(name)}; it must be {none}one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def checked_format(weight_format: object, of_weights: Mapping[str, object], transposed: bool) -> Format | None:
    """The format of a call's weights; None for weights of the dtype of x. ``of_weights``: the arguments of OF_WEIGHTS or
    OF_FORMAT. Raises ValueError: an unknown format, ``transposed`` weights; scales, zero points or input scales that the format
    lacks, or needs and are not given."""
    form = None if weight_format is None else format_named(weight_format, "None or ")
    for name, one in of_weights.items():
        given, words = one is not None, "scales"
        expected = form is not None
        if name.endswith("input_scale"):
            expected, words = form is not None and form.static, "input scales, of a format whose name ends in _static,"
        elif name.endswith("zero_point"):
            expected, words = form is not None and form.zero_bits > 0, "zero points, of a format whose name ends in _zero,"
        if given != expected:
            state = "given" if given else "None"
            raise ValueError(f"weight_format is {weight_format!r} and {name} is {state}; a format and both {words} go together")
    if form is not None and transposed:
        raise ValueError(f"transposed is True and weight_format is {weight_format!r}; it must be False then")
    return form


def check_tensor(name: str, tensor: object, first: str, like: torch.Tensor) -> None:
    """Raise TypeError, ValueError unless it is a dense tensor on the device of ``like``, the argument ``first``."""
    check_device(name, checked_tensor(name, tensor), first, like)


def check_flags(**flags: object) -> None:
    """Raise TypeError unless each is True or False."""
    for name, one in flags.items():
        check_flag(one, name)


def check_projections(gate_up: tuple[int, int, int], down: tuple[int, int, int]) -> None:
    """Raise ValueError unless both (experts, rows, columns) fit one layer."""
    (experts, rows, taken), (others, given, width) = gate_up, down
    if experts != others:
        raise ValueError(f"gate_up_proj has {experts} experts and down_proj {others}; they must have as many")
    if taken != given:
        raise ValueError(f"gate_up_proj takes {taken} columns and down_proj gives {given}; they must agree")
    if rows != width and rows != 2 * width:  # torch.compile traces no "in" of sizes that change
        raise ValueError(
            f"gate_up_proj has {rows} rows an expert and down_proj {width} columns; there must be twice as many rows (gates "
            "and ups) or as many (no gate)"
        )


def sizes_of(weights: torch.Tensor) -> tuple[int, int, int]:
    """Experts, rows and columns of weights [E, N, K] or of their codes."""
    experts, rows, _ = weights.shape
    return experts, rows, columns_of(weights)


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
    """Raise unless they are scales of codes [E, N, K] of ``codes_of``. ``halves``: gates, then ups."""
    if scale.dtype not in _SCALES[form.name]:
        raise TypeError(f"{name} has dtype {scale.dtype} and weight_format is {form.name!r}; it must be {_any(_SCALES, form)}")
    allowed = _shapes(codes, form, halves)
    if not any(scale.shape == one for one in allowed):
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be {', or '.join(str(list(one)) for one in allowed)}")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; weights in a format have none")


def check_zero_point(name: str, zero_point: torch.Tensor, codes: torch.Tensor, form: Format) -> None:
    """Raise unless they are zero points of codes [E, N, K]."""
    if zero_point.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {zero_point.dtype}; it must be int32, eight zero points each")
    (experts, rows), group = codes.shape[:2], form.group
    allowed = (experts, -(-rows // 8), columns_of(codes) // (group or 1))
    if zero_point.shape != allowed:
        raise ValueError(f"{name} has shape {tuple(zero_point.shape)}; it must be {list(allowed)}")


def check_input_scale(name: str, scale: torch.Tensor, experts: int) -> None:
    """Raise unless it is one scale of what weights are multiplied by, or one an expert."""
    if scale.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {scale.dtype}; it must be float32 or bfloat16 or float16")
    allowed = [(experts,), (experts, 1), (1,), ()]
    if tuple(scale.shape) not in allowed:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be {', or '.join(str(list(one)) for one in allowed)}")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; scales have none")


def check_positive(name: str, scale: torch.Tensor) -> None:
    """Raise ValueError unless every value is above 0 and finite. The host waits for them."""
    wrong = scale[~((scale > 0) & (scale < torch.inf))]
    if wrong.numel():
        raise ValueError(f"{name} has a value of {wrong[0].item():g}; it must be above 0 and finite")


def _shapes(codes: torch.Tensor, form: Format, halves: bool) -> list[tuple[int, ...]]:
    """The shapes that the scales of codes may have."""
    (experts, rows), (high, wide) = codes.shape[:2], form.block
    if wide is None:
        of_all = [(experts,), (experts, 1), (experts, 1, 1)]
        of_halves = [(experts, 2), (experts, 2, 1)] if halves else []
        return [(experts, rows, 1), (experts, rows), *of_all, *of_halves]
    columns = -(-columns_of(codes) // wide)
    as_one = experts, -(-rows // high), columns
    return [as_one, (experts, 2 * -(-rows // 2 // high), columns)] if halves and form.in_blocks else [as_one]


def codes_of(codes: torch.Tensor) -> torch.Tensor:
    """Checked codes as ``ops.formats`` takes them: no copy."""
    codes = codes.flatten(2) if codes.dim() == 4 else codes
    return codes.view(torch.uint8) if codes.dtype in _BYTES else codes


def scale_of(scale: torch.Tensor, weight_format: str | None) -> torch.Tensor:
    """Checked scales as ``ops.formats`` takes them: no copy."""
    if weight_format is not None and FORMATS[weight_format].in_channels:
        return scale.squeeze(2) if scale.dim() == 3 else scale[:, None] if scale.dim() == 1 else scale
    return scale.view(torch.uint8) if scale.dtype in _E8M0 else scale


def input_scale_of(scale: torch.Tensor, experts: int) -> torch.Tensor:
    """Checked input scales as [E], with stride 0 if all experts share one: no copy."""
    return scale.view(-1).expand(experts) if scale.numel() == 1 else scale.view(experts)


def _any(dtypes: dict[str, tuple[torch.dtype, ...]], form: Format) -> str:
    name: Callable[[torch.dtype], str] = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731
    return " or ".join(map(name, dtypes[form.name]))
