"""Experts that are spread over ranks, each of which has as many tokens: ours, one GPU's call, and what others do by NCCL.

The oracle computes some tokens of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from flashmoe_science.operations import public
from flashmoe_science.ops.distributed import Checked, Implementation, Results, gathered
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.proof.contract import CONTRACT
from flashmoe_science.records import ONE_GPU

Inputs = Mapping[str, torch.Tensor]

_OF_TOKENS = ("x", "topk_weights", "topk_ids")
_CHECKED = 32  # tokens of a rank that the oracle computes: those of DeepSeek-V3 touch most experts
_ONE_KERNEL = "moe_grouped_triton"  # by which exact results have the bits of one GPU's
_MODELS = {
    "mixtral-8x7b": "e8 k2 d4096 f14336 bf16",
    "deepseek-v3": "e256 k8 d7168 f2048 bf16",
    "qwen3-235b-a22b": "e128 k8 d4096 f1536 bf16",
    "gpt-oss-120b": "e128 k4 d2880 f2880 bf16 bias clamped interleaved transposed",
    "qwen3-30b-a3b": "e128 k8 d2048 f768 bf16",
}
SUITES = {  # tokens of both of two ranks
    "experts": tuple(f"moe t8192 {words}" for words in _MODELS.values()),
    "tokens": tuple(f"moe t{tokens} {_MODELS['qwen3-30b-a3b']}" for tokens in (2, 8, 32, 128)),
}


def implementations(problem: MoEProblem, inputs: Inputs, group: dist.ProcessGroup) -> list[Implementation]:
    """Raises ValueError: a routing from logits, tokens or experts that the ranks do not divide."""
    ranks = group.size()
    if problem.routing != "ids":
        raise ValueError(f"on several ranks the routing is {problem.routing!r}; it must be given, as ids")
    for name, count in (("tokens", problem.tokens), ("experts", problem.experts)):
        if count % ranks:
            raise ValueError(f"{name} is {count}; on {ranks} ranks it must be a multiple of {ranks}")
    local, one_gpu = _local(problem, inputs, group), public("flashmoe_science.moe:fused_moe")

    @cache
    def workspace(transport: str) -> Any:
        made = public("flashmoe_science.parallel:ExpertWorkspace")
        sizes = problem.tokens // ranks, problem.dim, problem.top_k, problem.experts
        return made(group, *sizes, CONTRACT.dtype(problem), transport=transport)

    def ours(combine: str, transport: str, **options: Any) -> torch.Tensor:
        fn = public("flashmoe_science.parallel:expert_parallel_moe")
        of_call = partial(fn, workspace=workspace(transport), combine=combine, **options)
        return CONTRACT.call(of_call, problem, local)  # type: ignore[no-any-return]

    def bits(transport: str) -> tuple[torch.Tensor, torch.Tensor]:
        by = {"kernel": _ONE_KERNEL} if inputs["x"].is_cuda else {}
        whole = CONTRACT.call(partial(one_gpu, **by), problem, inputs)
        return ours("exact", transport, **by), whole[_tokens(problem, group)]

    def expert_parallel(combine: str, transport: str) -> Implementation:
        def prepare() -> Callable[[], Results]:
            workspace(transport)
            return lambda: (ours(combine, transport),)

        equal = partial(bits, transport) if combine == "exact" else None
        return Implementation(f"expert_parallel_{combine}", transport, "ours", prepare, bits=equal)

    def on_one_gpu() -> Callable[[], Results]:
        return lambda: (CONTRACT.call(one_gpu, problem, inputs),)

    def own_part(results: Results) -> Results:
        return tuple(one[_tokens(problem, group)] for one in results)

    return [
        *(
            expert_parallel(combine, transport)
            for combine in ("reduced", "exact")
            for transport in ("collectives", "symmetric")
        ),
        Implementation(ONE_GPU, "fused_moe", "peer", on_one_gpu, own_part, single_gpu=True),
        Implementation("all_gather", "fused_moe", "peer", lambda: _gathered(problem, local, group), launches="nccl"),
        Implementation(
            "all_to_all", "grouped_mm", "peer", lambda: _exchanged(problem, local, group), capturable=False, launches="nccl"
        ),
    ]


def _tokens(problem: MoEProblem, group: dist.ProcessGroup) -> slice:
    each = problem.tokens // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each)


def _experts(problem: MoEProblem, group: dist.ProcessGroup) -> range:
    each = problem.experts // group.size()
    return range(group.rank() * each, (group.rank() + 1) * each)


def _local(problem: MoEProblem, inputs: Inputs, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """This rank's tokens with their routing, and its experts."""
    experts = _experts(problem, group)
    mine = slice(experts.start, experts.stop)
    return {name: one[_tokens(problem, group) if name in _OF_TOKENS else mine] for name, one in inputs.items()}


def _gathered(problem: MoEProblem, local: Inputs, group: dist.ProcessGroup) -> Callable[[], Results]:
    """All tokens on every rank, the experts of this one, and the sum over ranks scattered."""
    experts, fused_moe = _experts(problem, group), public("flashmoe_science.moe:fused_moe")

    def call() -> Results:
        x, weights, ids = (gathered(local[name], group).flatten(0, 1) for name in _OF_TOKENS)
        ids = torch.where((ids >= experts.start) & (ids < experts.stop), ids - experts.start, -1)
        partial_sums = CONTRACT.call(fused_moe, problem, {**local, "x": x, "topk_weights": weights, "topk_ids": ids})
        out = torch.empty_like(local["x"])
        dist.reduce_scatter_tensor(out, partial_sums, group=group)
        return (out,)

    return call


def _exchanged(problem: MoEProblem, local: Inputs, group: dist.ProcessGroup) -> Callable[[], Results]:
    """The rows of choices sent to their experts and back, as torchtitan does: the host waits for their numbers."""
    if problem.words() or problem.dtype != "bf16":
        raise ValueError("grouped_mm is called here for SwiGLU in bf16 without biases, in the default layout")
    ranks, experts = group.size(), problem.experts // group.size()
    x, w1, w2, weights, ids = local.values()

    def exchange(rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        got = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(got, rows, receive, send, group)
        return got

    def call() -> Results:
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=problem.experts).view(ranks, experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        send, receive = torch.stack((counts.sum(1), theirs.sum(1))).tolist()
        rows = exchange(x[order // problem.top_k], send, receive)
        of_expert = torch.arange(experts, device=x.device).repeat(ranks)
        place = of_expert.repeat_interleave(theirs.flatten(), output_size=sum(receive)).argsort(stable=True)
        ends = theirs.sum(0).cumsum(0).int()
        gate, up = F.grouped_mm(rows[place], w1.mT, offs=ends).chunk(2, -1)
        sorted_rows = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
        back = exchange(torch.empty_like(sorted_rows).index_copy_(0, place, sorted_rows), receive, send)
        choices = torch.empty_like(back).index_copy_(0, order, back).view(*ids.shape, -1)
        return ((choices * weights[..., None]).sum(1).to(x.dtype),)

    return call


def checked(problem: MoEProblem, inputs: Inputs, group: dist.ProcessGroup) -> Checked:
    """Some tokens of this rank, evenly spaced."""
    tokens = torch.arange(problem.tokens)[_tokens(problem, group)]
    picked = torch.linspace(0, len(tokens) - 1, min(len(tokens), _CHECKED)).long().to(inputs["x"].device)
    few = {name: one[_tokens(problem, group)][picked] if name in _OF_TOKENS else one for name, one in inputs.items()}

    def of_results(results: Results) -> Results:
        return tuple(one[picked] for one in results)

    return Checked(replace(problem, tokens=len(picked)), few, lambda results: results, of_results)
