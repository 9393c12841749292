"""The output, the log-sum-exp and the partials of a call with modes: their shapes and strides, and new tensors for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashmoe_science.ops.attention.call.inputs import AttentionInputs, strides_like
from flashmoe_science.ops.launch import allocator


def shapes_of_results(inputs: AttentionInputs) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the output, and the shape of the log-sum-exp: [batch, heads, seqlen_q], and [heads, total_q] of
    packed queries, as FlashAttention-3 gives it."""
    q, width = inputs.q, inputs.problem.head_dim_v
    batch, heads, rows, _ = q.shape
    if inputs.extras.cu_seqlens_q is not None:
        return (1, heads, rows, width), (rows * heads * width, width, heads * width, 1), (heads, rows)
    return (batch, heads, rows, width), strides_like(q.shape, q.stride(), width), (batch, heads, rows)


def results_of(
    inputs: AttentionInputs, floats: int, tokens_first: bool = False
) -> Callable[[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """allocate(out) for inputs like these: ``out``, or a new output where it is None, whose tokens come before its heads if so
    asked; the log-sum-exp if they ask for it; and ``floats`` numbers of partials if there are any."""
    shape, of_out, of_lse = shapes_of_results(inputs)
    strides_lse, packed = (of_lse[-2] * of_lse[-1], of_lse[-1], 1)[-len(of_lse) :], len(of_lse) == 2
    if tokens_first:
        (batch, heads, rows, width), (ob, oh, om, _) = shape, of_out
        # Packed queries have no dimension of sequences.
        shape, of_out = (batch, rows, heads, width)[packed:], (ob, om, oh, 1)[packed:]
    new, dtype, write_lse = allocator(inputs.q.device.type == "cuda"), inputs.q.dtype, inputs.return_lse

    def allocate(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if out is None:
            out = new(shape, of_out, dtype)
        lse = new(of_lse, strides_lse, torch.float32) if write_lse else None
        return out, lse, new((floats,), (1,), torch.float32) if floats else None

    return allocate
