"""Attention on ranks that each have a part of the tokens: ours, one GPU's call, and what others offer, by torch.distributed.

The oracle computes one key head and the query heads that share it, of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_science.operations import public
from flashmoe_science.ops.attention.peers import fa3
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.on_ranks import Results, Sample, Way, as_it_is
from flashmoe_science.records import ALONE

Inputs = Mapping[str, torch.Tensor]

_SIZES = "b1 h32 hk8", "d128 bf16 causal bshd"
SUITES = {
    "context": (
        *(f"attn {_SIZES[0]} q{1024 * thousands} {_SIZES[1]}" for thousands in (16, 32, 64)),
        f"attn b1 h32 q32768 {_SIZES[1]}",
    ),
    "packed": (f"attn b16 h32 hk8 q16256 {_SIZES[1]} packed",),  # documents of 0.6k to 16k
}


class Forward(NamedTuple):
    """A forward: ``fn`` of Q, K and V [B, tokens, heads, width], this rank's or, of one that is ``alone``, all. ``trains``: it
    is differentiable."""

    name: str
    config: str
    origin: Literal["ours", "peer"]
    fn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    cannot: str | None = None
    alone: bool = False
    graphs: bool = True
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    launches: str = ""
    trains: bool = True


def ways(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup) -> list[Way]:
    def bind(one: Forward, *qkv: torch.Tensor) -> Callable[[], Results]:
        return lambda: (one.fn(*qkv),)

    return [as_way(one, bind, ("q", "k", "v"), inputs, group) for one in forwards(problem, inputs, group)]


def as_way(
    one: Forward,
    bind: Callable[..., Callable[[], Results]],
    names: tuple[str, ...],
    inputs: Inputs,
    group: dist.ProcessGroup,
) -> Way:
    """A way that calls what ``bind`` gives of the forward and of the inputs of these names [B, tokens, heads, width]."""

    def prepare() -> Callable[[], Results]:
        if one.cannot is not None:
            raise ValueError(one.cannot)
        whole = (inputs[name].transpose(1, 2) for name in names)
        return bind(one, *(whole if one.alone else (cut(x, group) for x in whole)))

    part = (lambda results: tuple(cut(x, group) for x in results)) if one.alone else as_it_is
    return Way(one.name, one.config, one.origin, prepare, part, one.alone, one.graphs, one.within, launches=one.launches)


def cut(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tokens of x [B, tokens, ...]."""
    mine: torch.Tensor = public("flashmoe_science.parallel:shard")(x, 1, group)
    return mine.contiguous()


def forwards(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup) -> list[Forward]:
    """Ours, one GPU's and peers'. Raises ValueError: features other than packed documents, more keys than queries or fewer."""
    others = [word for word in problem.features.words() if word != "packed"]
    if others:
        raise ValueError(f"{others[0]!r} is not measured on several ranks; of the features, only 'packed' is")
    if problem.seqlen_q != problem.seqlen_k:
        raise ValueError(f"q is {problem.seqlen_q} and k {problem.seqlen_k}; on several ranks they must be the same")
    on_gpu = inputs["q"].is_cuda
    no_gpu = None if on_gpu else "it needs GPUs"
    no_fa3 = no_gpu or fa3.absent() or (None if problem.op == "attention" else "its wheel has no backward")
    no_heads = f"{group.size()} ranks do not divide the key heads" if problem.heads_kv % group.size() else None
    tokens = inputs["q"].shape[2]
    uneven = "it needs shards of equal size" if tokens % (2 * group.size()) else None
    no_ring = no_gpu or uneven or ("it has no packed documents" if "cu_seqlens_q" in inputs else None)
    best = "fa3" if no_fa3 is None else "flash_attn_func"
    found = [
        Forward("context_attention", "messages", "ours", _ours(problem, inputs, group)),
        Forward("context_attention", "copies", "ours", _ours(problem, inputs, group, copies=on_gpu), no_gpu),
        Forward("context_attention", "heads", "ours", _ours(problem, inputs, group, exchange="heads"), no_heads),
        Forward(ALONE, "flash_attn_func", "peer", _whole(problem, inputs, "flash_attn_func"), alone=True),
        Forward(ALONE, "fa3", "peer", _whole(problem, inputs, "fa3"), no_fa3, alone=True, trains=False),
        Forward("all_gather", best, "peer", _gathered(problem, inputs, group, best), uneven, trains=False, launches="nccl"),
    ]
    shared = problem.heads // problem.heads_kv  # query heads of a key head
    within = _as_context_parallel(group, inputs["q"].device)
    for config, repeats in ({"enable_gqa": 1, "repeated heads": shared} if shared > 1 else {"sdpa": 1}).items():
        ring = _ring(problem, repeats)
        found.append(
            Forward("torch_context_parallel", config, "peer", ring, no_ring, graphs=False, within=within, launches="nccl")
        )
    return found


def _ours(
    problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup, copies: bool = False, **options: Any
) -> Callable[..., torch.Tensor]:
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


def _whole(problem: AttentionProblem, inputs: Inputs, by: str) -> Callable[..., torch.Tensor]:
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


def _gathered(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup, by: str) -> Callable[..., torch.Tensor]:
    """All keys and values by one collective, then a call for each chunk of queries."""
    tokens, ranks, starts = inputs["q"].shape[2], group.size(), inputs.get("cu_seqlens_q")
    step = tokens // (2 * ranks)
    own = group.rank(), 2 * ranks - 1 - group.rank()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = torch.cat((k, v), -1)  # [B, tokens of a rank, heads, D + Dv]
        every = kv.new_empty(ranks * kv.shape[0], *kv.shape[1:])
        dist.all_gather_into_tensor(every, kv, group)
        halves = every.unflatten(0, (ranks, -1)).unflatten(2, (2, -1))  # [ranks, B, 2, tokens of a chunk, heads, D + Dv]
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


def _ring(problem: AttentionProblem, repeats: int) -> Callable[..., torch.Tensor]:
    """PyTorch's operator, which is a ring within ``_as_context_parallel``."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (k, v))
        shared = keys.shape[1] < q.shape[2]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=problem.causal, enable_gqa=shared)
        return out.transpose(1, 2)

    return call


def _as_context_parallel(group: dist.ProcessGroup, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
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


def sample(problem: AttentionProblem, inputs: Inputs, group: dist.ProcessGroup) -> Sample:
    """One key head and its query heads."""
    heads = problem.heads // problem.heads_kv
    few = {name: x[:, : heads if name in ("q", "dout") else 1] if x.dim() == 4 else x for name, x in inputs.items()}
    queries = ("out", "dq")
    names = ("dq", "dk", "dv") if "dout" in inputs else ("out",)

    def of_reference(results: Results) -> Results:
        return tuple(cut(x.transpose(1, 2), group) for x in results[: len(names)])

    def of_part(results: Results) -> Results:
        return tuple(x[:, :, : heads if name in queries else 1] for name, x in zip(names, results, strict=True))

    return Sample(replace(problem, heads=heads, heads_kv=1), few, of_reference, of_part)
