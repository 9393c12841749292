"""Attention on ranks that each have a part of the tokens: ours, one GPU's call, and what others offer, by torch.distributed.
Of steps of decoding ``ranks_decode`` tells.

The oracle computes one key head and the query heads that share it, of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_science.operations import public
from flashmoe_science.ops.attention.peers import fa3
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.proof import ranks_decode
from flashmoe_science.ops.distributed import Checked, Implementation, Results, gathered
from flashmoe_science.records import ONE_GPU

Inputs = Mapping[str, torch.Tensor]
Forward = Callable[..., torch.Tensor]  # of Q, K and V [B, tokens, heads, width]
Context = Callable[[], AbstractContextManager[Any]]
Bind = Callable[..., Callable[[], Results]]

_SIZES = "b1 h32 hk8", "d128 bf16 causal bshd"
SUITES = {
    "context": (
        *(f"attn {_SIZES[0]} q{1024 * thousands} {_SIZES[1]}" for thousands in (16, 32, 64)),
        f"attn b1 h32 q32768 {_SIZES[1]}",
    ),
    "packed": (f"attn b16 h32 hk8 q16256 {_SIZES[1]} packed",),  # documents of 0.6k to 16k
    **ranks_decode.SUITES,
}


def _forward(forward: Forward, context: Context, *qkv: torch.Tensor) -> Callable[[], Results]:
    return lambda: (forward(*qkv),)


def implementations(
    problem: AttentionProblem,
    inputs: Inputs,
    group: dist.ProcessGroup,
    names: Sequence[str] = ("q", "k", "v"),
    bind: Bind = _forward,
) -> list[Implementation]:
    """Ours, one GPU's and peers'. ``bind`` makes a call of a forward, its context and the inputs of these names [B, tokens,
    heads, width], this rank's tokens or all. Raises ValueError: features other than packed documents, more keys than queries
    or fewer."""
    if ranks_decode.is_step(problem):
        return ranks_decode.implementations(problem, inputs, group)
    others = [word for word in problem.features.words() if word != "packed"]
    if others:
        raise ValueError(f"{others[0]!r} is not measured on several ranks; of the features, only 'packed' is")
    if problem.seqlen_q != problem.seqlen_k:
        raise ValueError(f"q is {problem.seqlen_q} and k {problem.seqlen_k}; on several ranks they must be the same")
    on_gpu = inputs["q"].is_cuda
    no_gpu = None if on_gpu else "it needs GPUs"
    no_backward = None if problem.op == "attention" else "it has no backward"
    no_fa3 = no_gpu or fa3.absent() or no_backward
    no_heads = f"{group.size()} ranks do not divide the key heads" if problem.heads_kv % group.size() else None
    tokens = inputs["q"].shape[2]
    uneven = "it needs shards of equal size" if tokens % (2 * group.size()) else None
    no_ring = no_gpu or uneven or ("it has no packed documents" if "cu_seqlens_q" in inputs else None)
    best = "fa3" if no_fa3 is None else "flash_attn_func"

    def made(
        name: str,
        config: str,
        forward: Forward,
        cannot: str | None = None,
        single_gpu: bool = False,
        context: Context = nullcontext,
        **rest: Any,
    ) -> Implementation:
        def prepare() -> Callable[[], Results]:
            if cannot is not None:
                raise ValueError(cannot)
            whole = (inputs[one].transpose(1, 2) for one in names)
            return bind(forward, context, *(whole if single_gpu else (cut(x, group) for x in whole)))

        def own_part(results: Results) -> Results:
            return tuple(cut(x, group) for x in results) if single_gpu else results

        origin: Literal["ours", "peer"] = "ours" if name == "context_attention" else "peer"
        return Implementation(name, config, origin, prepare, own_part, single_gpu, context=context, **rest)

    shared = problem.heads // problem.heads_kv  # query heads of a key head
    ring: dict[str, Any] = {"capturable": False, "context": _as_context_parallel(group, inputs["q"].device), "launches": "nccl"}
    rings = {"enable_gqa": 1, "repeated heads": shared} if shared > 1 else {"sdpa": 1}
    return [
        made("context_attention", "messages", _ours(problem, inputs, group, exchange="keys")),
        made("context_attention", "copies", _ours(problem, inputs, group, copies=on_gpu), no_gpu),
        made("context_attention", "heads", _ours(problem, inputs, group, exchange="heads"), no_heads),
        made("context_attention", "ring", _ours(problem, inputs, group, exchange="ring")),
        made(ONE_GPU, "flash_attn_func", _whole(problem, inputs, "flash_attn_func"), single_gpu=True),
        made(ONE_GPU, "fa3", _whole(problem, inputs, "fa3"), no_fa3, single_gpu=True),
        made("all_gather", best, _gathered(problem, inputs, group, best), uneven or no_backward, launches="nccl"),
        *(
            made("torch_context_parallel", config, _ring(problem, repeats), no_ring, **ring)
            for config, repeats in rings.items()
        ),
    ]


def cut(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tokens of x [B, tokens, ...]."""
    mine: torch.Tensor = public("flashmoe_science.parallel:shard")(x, 1, group)
    return mine.contiguous()


def _ours(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup, copies: bool = False, **options: Any) -> Forward:
    starts, tokens = inputs.get("cu_seqlens_q"), inputs["q"].shape[2]

    @cache
    def workspace() -> Any:
        most = inputs["k"].nbytes + inputs["v"].nbytes  # of all ranks: chunks may differ by a token
        return public("flashmoe_science.parallel:ContextWorkspace")(group, most) if copies else None

    if starts is not None:
        options |= {"cu_seqlens": starts, "max_seqlen": problem.seqlen_q}
    attend = public("flashmoe_science.parallel:context_attention")

    def call(*qkv: torch.Tensor) -> torch.Tensor:
        flat = qkv if starts is None else tuple(x[0] for x in qkv)
        out: torch.Tensor = attend(*flat, group=group, seqlen=tokens, causal=problem.causal, workspace=workspace(), **options)
        return out if starts is None else out[None]

    return call


def _whole(problem: AttentionProblem, inputs: Inputs, by: str) -> Forward:
    starts = inputs.get("cu_seqlens_q")
    return lambda q, k, v: _attend(q, k, v, problem.causal, starts, starts, problem.seqlen_q, by)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    starts_q: torch.Tensor | None,
    starts_k: torch.Tensor | None,
    longest: int,
    by: str,
) -> torch.Tensor:
    """One GPU's attention of Q to K and V [B, tokens, heads, width]: by ours, or by FlashAttention-3."""
    module = "fa3_fwd_interface" if by == "fa3" else "flashmoe_science"
    if starts_q is None:
        found = public(f"{module}:flash_attn_func")(q, k, v, causal=causal)
    else:
        lengths = min(longest, q.shape[1]), min(longest, k.shape[1])
        varlen = public(f"{module}:flash_attn_varlen_func")
        found = varlen(q[0], k[0], v[0], starts_q, starts_k, *lengths, causal=causal)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out if starts_q is None else out[None]


def _gathered(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup, by: str) -> Forward:
    """All keys and values by one collective, then a call for each chunk of queries."""
    tokens, ranks, starts = inputs["q"].shape[2], group.size(), inputs.get("cu_seqlens_q")
    step = tokens // (2 * ranks)
    own = group.rank(), 2 * ranks - 1 - group.rank()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        every = gathered(torch.cat((k, v), -1), group)
        halves = every.unflatten(2, (2, -1))  # [ranks, B, 2, tokens of a chunk, heads, D + Dv]
        whole = torch.cat([*halves[:, :, 0].unbind(), *halves[:, :, 1].flip(0).unbind()], 1)
        keys, values = whole.split((k.shape[-1], v.shape[-1]), -1)
        found = []
        for chunk, rows in zip(own, q.split(step, 1), strict=True):
            first, last = chunk * step, (chunk + 1) * step if problem.causal else tokens
            starts_q = None if starts is None else starts.clamp(first, first + step) - first
            starts_k = None if starts is None else starts.clamp(0, last)
            seen = keys[:, :last].contiguous(), values[:, :last].contiguous()
            found.append(_attend(rows.contiguous(), *seen, problem.causal, starts_q, starts_k, problem.seqlen_q, by))
        return torch.cat(found, 1)

    return call


def _ring(problem: AttentionProblem, repeats: int) -> Forward:
    """PyTorch's operator, which is a ring within ``_as_context_parallel``."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (k, v))
        shared = keys.shape[1] < q.shape[2]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=problem.causal, enable_gqa=shared)
        return out.transpose(1, 2)

    return call


def _as_context_parallel(group: dist.ProcessGroup, device: torch.device) -> Context:
    @cache
    def mesh() -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, device.type)

    @contextmanager
    def within() -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        tokens = torch.zeros(2 * group.size(), device=device)  # it cuts what it is given: shards are cut already
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh(), buffers=[tokens], buffer_seq_dims=[0]):
            yield

    return within


def checked(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup) -> Checked:
    """One key head and its query heads."""
    heads = problem.heads // problem.heads_kv
    few = {name: x[:, : heads if name in ("q", "dout") else 1] if x.dim() == 4 else x for name, x in inputs.items()}
    queries = ("out", "dq")
    names = ("dq", "dk", "dv") if "dout" in inputs else ("out",)

    def of_reference(results: Results) -> Results:
        found = [x.transpose(1, 2) for x in results[: len(names)]]
        return tuple(found if ranks_decode.is_step(problem) else (cut(x, group) for x in found))

    def of_results(results: Results) -> Results:
        return tuple(x[:, :, : heads if name in queries else 1] for name, x in zip(names, results, strict=True))

    return Checked(replace(problem, heads=heads, heads_kv=1), few, of_reference, of_results)
