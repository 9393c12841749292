"""Launches of kernels that take Q, K, V, O, the log-sum-exp and a scale, by the tensors' addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.kernel import AttentionLaunch
from flashmoe_science.ops.attention.call.outputs import Result, outputs_of
from flashmoe_science.ops.attention.call.tensors import Given, MaybeTensor, Options, Tensors
from flashmoe_science.ops.launch import INTERPRETING, Pointer, address, allocator


def launch_by_address(
    start: Callable[..., None], tensors: Tensors, options: Options, strides: tuple[int, ...]
) -> AttentionLaunch:
    """The launch for tensors like these. An address spares the driver a look-up; where kernels are interpreted it is a tensor.

    Args:
        start: takes the addresses of Q, K, V, O and of the log-sum-exp or None, then the scale (``Build.bound``).
        strides: ``out_strides``.
    """
    of_out, of_lse = outputs_of(tensors, options, strides)
    new, default_scale = allocator(tensors.q.is_cuda), tensors.q.shape[3] ** -0.5
    must_align = alignment_mask(tensors)

    def launch(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result | None:
        q, k, v = address(tensors[0]), address(tensors[1]), address(tensors[2])
        if must_align and (q | k | v) & must_align:
            return None
        if out is None:
            out = new(*of_out)
        if of_lse is not None and lse is None:
            lse = new(*of_lse)
        start(q, k, v, address(out), None if lse is None else address(lse), default_scale if scale is None else scale)
        return out, lse

    return launch


def check_programs(*counts: int) -> None:
    """Raise CannotServe if a grid of any of these numbers of programs is larger than a launch may have."""
    if max(counts) >= 2**31:
        raise CannotServe(f"it takes {max(counts)} programs; a launch may have {2**31 - 1}")


def element_pointer(tensor: torch.Tensor | None, address: int = 4) -> Pointer | None:
    """Stands in for a tensor of which single elements are read, booleans as bytes; None for none."""
    if tensor is None:
        return None
    return Pointer(torch.uint8 if tensor.dtype == torch.bool else tensor.dtype, address)


def alignment_mask(tensors: Tensors) -> int:
    """The bits of an address that must be 0 for a build that is specialised on aligned Q, K and V; 0 where it is not, or where
    kernels are interpreted."""
    if INTERPRETING:
        return 0
    return 0 if (tensors.q.data_ptr() | tensors.k.data_ptr() | tensors.v.data_ptr()) & 15 else 15
