"""A step of decoding on ranks that each have every N-th token of a cache: ours, one GPU's call of the whole cache, and others'.

Every rank has the whole result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_science.operations import public
from flashmoe_science.ops.attention.peers import fa3
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.distributed import Implementation, Results, gathered
from flashmoe_science.records import ONE_GPU

Inputs = Mapping[str, torch.Tensor]

# Keys and values of 1.07 GB, twice; of lengths of a mix 0.7 and 0.17 GB; 2.1 GB.
_LENGTHS = (
    ("b1", "k262144", ""),
    ("b8", "k32768", ""),
    ("b32", "k8192", " ragged"),
    ("b32", "k2048", " ragged"),
    ("b64", "k8192", ""),
)
SUITES = {"context-decode": tuple(f"attn {batch} h32 hk8 q1 {keys} d128 bf16 bshd{more}" for batch, keys, more in _LENGTHS)}


def is_step(problem: AttentionProblem) -> bool:
    """Whether it is a step of decoding."""
    return problem.seqlen_q == 1 < problem.seqlen_k


def implementations(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup) -> list[Implementation]:
    """Raises ValueError: features other than lengths."""
    if others := [word for word in problem.features.words() if word != "ragged"]:
        raise ValueError(f"{others[0]!r} is not measured on several ranks; of the features of a step, only 'ragged' is")
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    whole = inputs.get("cache_seqlens")
    lengths = torch.full((len(q),), k.shape[1], dtype=torch.int32, device=q.device) if whole is None else whole
    rank, ranks = group.rank(), group.size()
    own_lengths = (lengths + (ranks - 1 - rank)) // ranks
    own = [k[:, rank::ranks].contiguous(), v[:, rank::ranks].contiguous()]
    no_gpu = None if q.is_cuda else "it needs GPUs"
    no_fa3 = no_gpu or fa3.absent()
    best = "flash_attn_with_kvcache" if no_fa3 else "fa3"

    def made(name: str, config: str, prepare: Callable[[], Callable[[], torch.Tensor]], **rest: Any) -> Implementation:
        def prepared() -> Callable[[], Results]:
            call = prepare()
            return lambda: (call(),)

        return Implementation(name, config, "ours" if name == "context_decode" else "peer", prepared, **rest)

    def ours(symmetric: bool) -> Callable[[], torch.Tensor]:
        workspace = None
        if symmetric:
            workspace = public("flashmoe_science.parallel:DecodeWorkspace")(group, len(q), q.shape[2], v.shape[3], q.dtype)
        decode = public("flashmoe_science.parallel:context_decode")
        return lambda: decode(q, *own, group=group, cache_seqlens=lengths, workspace=workspace)

    def one_gpu(by: str) -> Callable[[], torch.Tensor]:
        if by == "fa3" and no_fa3:
            raise ValueError(no_fa3)
        attend = _attend(by)
        of_all = k.shape[1] if whole is None else whole
        return lambda: attend(q, k, v, cache_seqlens=of_all)

    return [
        made("context_decode", "collectives", lambda: ours(False)),
        made("context_decode", "symmetric", lambda: ours(True)),
        *(
            made(ONE_GPU, by, lambda by=by: one_gpu(by), single_gpu=True)  # type: ignore[misc]
            for by in ("flash_attn_with_kvcache", "fa3")
        ),
        made("all_gather", best, lambda: _gathered(q, own, own_lengths, group, best), launches="nccl"),
    ]


def _attend(by: str) -> Callable[..., Any]:
    module = "fa3_fwd_interface" if by == "fa3" else "flashmoe_science"
    attend: Callable[..., Any] = public(f"{module}:flash_attn_with_kvcache")
    return attend


def _gathered(
    q: torch.Tensor, own: Sequence[torch.Tensor], lengths: torch.Tensor, group: dist.ProcessGroup, by: str
) -> Callable[[], torch.Tensor]:
    """Attention to this rank's keys; results and log-sum-exps by two collectives, and PyTorch's softmax of the latter."""
    attend = _attend(by)

    def call() -> torch.Tensor:
        out, lse, *_ = attend(q, *own, cache_seqlens=lengths, return_softmax_lse=True)
        weights = gathered(lse, group).softmax(0).transpose(2, 3)[..., None]  # [ranks, B, 1, heads, 1]
        merged: torch.Tensor = (weights * gathered(out, group)).sum(0).to(out.dtype)
        return merged

    return call
