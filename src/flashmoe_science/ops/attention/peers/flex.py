"""PyTorch's FlexAttention, compiled. Its eager form is the plain maths and is not what anyone would run for speed.

Each problem is compiled for its own sizes (``dynamic=False``), which takes seconds: its fastest form, not its quickest start.
Windows and prefixes are block masks, caps and ALiBi are score functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput, finish
from flashmoe_science.ops.attention.peers import peer_kernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import compiled, launches_of

if TYPE_CHECKING:
    import torch

_SERVED = ("window", "softcap", "alibi", "prefix")


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlexAttention is measured on GPUs only"
    if device.compute_capability < (8, 0):
        return "FlexAttention needs compute capability 8.0"
    if min(problem.head_dim, problem.head_dim_v) < 16:
        return "FlexAttention needs head dimensions of 16 or more"
    return unsupported(problem.features, _SERVED, "FlexAttention, as it is measured here,")


@functools.lru_cache(maxsize=16)
def _block_mask(problem: AttentionProblem, device: str) -> Any:
    """The blocks that the mask leaves; batch and heads of the problem have no part in it."""
    from torch.nn.attention.flex_attention import create_block_mask

    features, causal, prefix = problem.features, problem.causal, problem.features.prefix
    offset = 0 if problem.mask == "causal-topleft" else problem.seqlen_k - problem.seqlen_q
    left, right = features.window_left, 0 if causal else features.window_right

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = key >= 0
        if right is not None:
            seen = (key <= query + offset + right) | (key < prefix) if prefix else key <= query + offset + right
        return seen if left is None else seen & (key >= query + offset - left)

    # Compiled, because the plain form builds the whole mask: 2 GiB of indices at S = 16384.
    queries, keys = problem.seqlen_q, problem.seqlen_k
    return create_block_mask(visible, None, None, queries, keys, device=device, _compile=queries * keys > 2**24)


@functools.lru_cache(maxsize=16)
def _capped(cap: float) -> Callable[..., torch.Tensor]:
    import torch

    def score(s: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(s / cap)

    return score


def _score(inputs: AttentionInputs) -> Callable[..., torch.Tensor] | None:
    """What the features do to a score before the mask."""
    capped = _capped(inputs.options.softcap) if inputs.problem.features.softcap else None
    slopes, offset = inputs.tensors.alibi_slopes, inputs.problem.seqlen_k - inputs.problem.seqlen_q
    if slopes is None:
        return capped

    def score(s: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        s = s if capped is None else capped(s, batch, head, query, key)
        return s - slopes[batch, head] * (query + offset - key).abs()

    return score


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    from torch.nn.attention.flex_attention import flex_attention

    problem = inputs.problem
    mask = None
    if problem.causal or problem.features.window:
        mask = _block_mask(replace(problem, batch=1, heads=1, heads_kv=1), str(inputs.q.device))
    out = compiled(flex_attention)(
        *inputs.tensors[:3],
        score_mod=_score(inputs),
        block_mask=mask,
        scale=inputs.softmax_scale,
        enable_gqa=problem.heads != problem.heads_kv,
    )
    return finish(inputs, out)


KERNEL = peer_kernel(
    name="flex",
    about="PyTorch's FlexAttention, compiled for the problem's sizes",
    supports=supports,
    run=run,
    launches=launches_of("triton_.*flex_(attention|decoding)"),
    slow=True,
)
