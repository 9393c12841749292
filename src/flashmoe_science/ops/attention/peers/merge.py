"""Merges by PyTorch's operators: all parts at once, also compiled, and one part after the other, as in ring attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from flashmoe_science.kernel import Device
from flashmoe_science.ops.attention.call.merge import MergeInputs, MergeKernel, Result
from flashmoe_science.ops.attention.problem.merge import AttentionMergeProblem
from flashmoe_science.ops.peer import compiled, launches_of, one_config


def merged(outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor]) -> Result:
    """(out [..., head_dim], lse [...]) of parts of these shapes, as attention to all their keys, in the wider of their dtypes.
    A part is ignored where its log-sum-exp is -inf; zeros and -inf where all are."""
    every = torch.stack([*lses])
    keyless = every == -torch.inf
    # Of nothing but -inf logsumexp has no gradient, and of 0 * out neither has 0 where out is no number.
    lse = torch.logsumexp(every.masked_fill(keyless, torch.finfo(every.dtype).min), 0)
    weights = [torch.exp(one - lse).unsqueeze(-1) for one in lses]
    parts = [weight * out.masked_fill(weight == 0.0, 0.0) for weight, out in zip(weights, outs, strict=True)]
    return torch.stack(parts).sum(0), lse.masked_fill(keyless.all(0), -torch.inf)


def at_once(outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor) -> Result:
    """(out, lse) in a part's shapes and dtypes: outs are [..., tokens, heads, head_dim], lses [..., heads, tokens]."""
    out, lse = merged(outs, [one.transpose(-1, -2) for one in lses])
    return out.to(outs[0].dtype), lse.transpose(-1, -2)


def in_turns(inputs: MergeInputs) -> Result:
    """Each part by sigmoids of differences (zhuzilin/ring-flash-attention, pull request 34), which -inf has none of."""
    every = zip(inputs.outs, [one.transpose(-1, -2) for one in inputs.lses], strict=True)
    out, lse = next(every)
    out = out.float().masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    for part, of_part in every:
        none = of_part == -torch.inf
        apart = torch.where(none, of_part, of_part - lse)
        weight = torch.sigmoid(apart).unsqueeze(-1)
        out = torch.where(none.unsqueeze(-1), out, torch.lerp(out, part.float(), weight))
        lse = torch.where(none, lse, of_part - F.logsigmoid(apart))
    return out.to(inputs.outs[0].dtype), lse.transpose(-1, -2)


def _supports_several(problem: AttentionMergeProblem, device: Device) -> str | None:
    return None if problem.parts > 1 else "there is one part, and nothing to merge with it"


def _supports_compiled(problem: AttentionMergeProblem, device: Device) -> str | None:
    return "torch.compile is measured on GPUs only" if device is None else None


_peer = partial(
    MergeKernel, origin="peer", op="attention_merge", configs=one_config, launches=launches_of(), on_cpu=True,
)  # fmt: skip
AT_ONCE = _peer(
    name="merge_at_once",
    about="PyTorch's operators on all parts at once",
    supports=lambda problem, device: None,
    run=lambda inputs, config: at_once(*inputs),
)
COMPILED = _peer(
    name="merge_compiled",
    about="PyTorch's operators on all parts at once, by torch.compile",
    supports=_supports_compiled,
    run=lambda inputs, config: compiled(at_once)(*inputs),
)
IN_TURNS = _peer(
    name="merge_in_turns",
    about="PyTorch's operators, one part after the other",
    supports=_supports_several,
    run=lambda inputs, config: in_turns(inputs),
)
