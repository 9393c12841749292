"""The outputs of an attention call by name: shape, strides and dtype of each, and new tensors for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.tensors import Options, Tensors


class TensorLike(NamedTuple):
    """A tensor that is to be allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Outputs(NamedTuple):
    """``out`` has the input dtype and the memory order of q: [B, S, H, D] stays so. ``lse`` is fp32 and contiguous, natural
    logarithm, -inf for a row that sees neither a key nor a sink; None if not asked for."""

    out: TensorLike
    lse: TensorLike | None


Result = tuple[torch.Tensor, torch.Tensor | None]


def outputs_of(tensors: Tensors, options: Options, strides: tuple[int, ...]) -> Outputs:
    """The outputs of a call; their order of dimensions is that of ``Options.tokens_first``. ``strides``: ``out_strides``."""
    q, width = tensors.q, tensors.v.shape[3]
    batch, heads, rows, _ = q.shape
    shape: tuple[int, ...] = (batch, heads, rows, width)
    lse_shape: tuple[int, ...] = (batch, heads, rows)
    if options.tokens_first:
        (ob, oh, om, od), packed = strides, tensors.cu_seqlens_q is not None
        shape, strides = (batch, rows, heads, width)[packed:], (ob, om, oh, od)[packed:]
        lse_shape = lse_shape[packed:]
    lse_strides = (heads * rows, rows, 1)[-len(lse_shape) :]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = TensorLike(lse_shape, lse_strides, wide) if options.return_lse else None
    return Outputs(TensorLike(shape, strides, q.dtype), lse)


def tokens_first(result: Result, packed: bool) -> Result:
    """A heads-first result in the order of ``Options.tokens_first``."""
    out, lse = result
    # Not out[0]: its gradient would be copied into zeros.
    out = out.squeeze(0).transpose(0, 1) if packed else out.transpose(1, 2)
    return out, lse.squeeze(0) if packed and lse is not None else lse


def out_strides(tensors: Tensors, out: torch.Tensor | None = None) -> tuple[int, ...]:
    """Strides of the output as [batch, heads, seqlen_q, head_dim_v]: those of ``out`` if given."""
    return strides_like(tensors.q.shape, tensors.q.stride(), tensors.v.shape[3]) if out is None else out.stride()


def strides_like(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Strides of a dense [batch, heads, seqlen_q, width] output in the memory order of queries of that shape and strides."""
    _, heads, rows, _ = shape
    if strides[1] < strides[2]:
        return (rows * heads * width, width, heads * width, 1)
    return (heads * rows * width, rows * width, width, 1)


def in_order_of(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` in the memory order of ``q``: itself, or a copy if a peer or PyTorch chose another order."""
    strides = strides_like(q.shape, q.stride(), out.shape[3])
    return out if out.stride() == strides else out.new_empty_strided(out.shape, strides).copy_(out)
