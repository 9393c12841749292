"""What a launch passes of ALiBi slopes or a bias: its strides and how many elements a kernel reads at once (bias.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.tensors import Tensors
from flashmoe_science.ops.attention.device.bias import AT_ONCE
from flashmoe_science.ops.launch import Pointer

PAIR = 2  # neighbouring scores of a thread
STRIDES = ("stride_slopes", "stride_bias_b", "stride_bias_h", "stride_bias_m")
_LONG = 2**40  # a stride of 64 bits, as all are taken: a head of a bias may span 2^31 elements


class BiasOf(NamedTuple):
    """What a launch depends on of slopes or of a bias: its strides, None where there is none, as of STRIDES."""

    strides: tuple[int | None, ...]
    unit: int = 1  # elements of a bias that are read at once


NO_BIAS = BiasOf((None,) * len(STRIDES))


def bias_of(tensors: Tensors) -> BiasOf:
    """The BiasOf of a call. Raises CannotServe."""
    slopes, bias = tensors.alibi_slopes, tensors.bias
    if slopes is not None:
        return BiasOf((slopes.stride(0), None, None, None))
    if bias is None:
        return NO_BIAS
    strides = bias.stride()[:3]
    of_key = bias.stride(3)
    if of_key != 1:
        raise CannotServe(f"the bias has stride {of_key} from key to key; this kernel needs 1")
    begin, units = (*strides, bias.data_ptr() // bias.itemsize), (PAIR,) if bias.dtype == torch.bool else (AT_ONCE.value, PAIR)
    return BiasOf((None, *strides), next((unit for unit in units if all(one % unit == 0 for one in begin)), 1))


def placeholders(dtypes: Sequence[torch.dtype | None], unit: int) -> tuple[Any, ...]:
    """Placeholder arguments for compilation: sinks, slopes, a bias of which ``unit`` elements are read at once, and STRIDES."""
    sinks, slopes, bias = (None if dtype is None else Pointer(dtype, 4) for dtype in dtypes)
    if bias is not None:  # said to begin at 16 bytes where it need only begin at a pair: of a pair no compiler makes more
        bias = Pointer(torch.uint8 if bias.dtype == torch.bool else bias.dtype, 0 if unit > 1 else 1)
    return sinks, slopes, bias, None if slopes is None else _LONG, *(None if bias is None else _LONG,) * 3
