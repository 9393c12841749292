"""PyTorch's FlexAttention, compiled. Its eager form is the plain maths and is not what anyone would run for speed.

Each problem is compiled for its own sizes (``dynamic=False``), which takes seconds: its fastest form, not its quickest start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionKernel, AttentionOutput, finish
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.peer import one_config

if TYPE_CHECKING:
    import torch

_PROBLEMS_COMPILED = 256  # beyond this many shapes torch.compile refuses, and never falls back, as fullgraph=True


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlexAttention is measured on GPUs only"
    if device.compute_capability < (8, 0):
        return "FlexAttention needs compute capability 8.0"
    if min(problem.head_dim, problem.head_dim_v) < 16:
        return "FlexAttention needs head dimensions of 16 or more"
    return None


@functools.cache
def _compiled() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _PROBLEMS_COMPILED)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


@functools.lru_cache(maxsize=16)
def _block_mask(seqlen_q: int, seqlen_k: int, offset: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query + offset

    # Compiled, because the plain form builds the whole mask: 2 GiB of indices at S = 16384.
    return create_block_mask(visible, None, None, seqlen_q, seqlen_k, device=device, _compile=seqlen_q * seqlen_k > 2**24)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    problem = inputs.problem
    mask = None
    if problem.causal:
        mask = _block_mask(problem.seqlen_q, problem.seqlen_k, problem.causal_offset, str(inputs.q.device))
    out = _compiled()(
        inputs.q,
        inputs.k,
        inputs.v,
        block_mask=mask,
        scale=inputs.softmax_scale,
        enable_gqa=problem.heads != problem.heads_kv,
    )
    return finish(inputs, out)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return (Launch("triton_.*flex_(attention|decoding)"),)


KERNEL = AttentionKernel(
    name="flex",
    origin="peer",
    op="attention",
    about="PyTorch's FlexAttention, compiled for the problem's sizes",
    supports=supports,
    configs=one_config,
    run=run,
    launches=launches,
    slow=True,
)
