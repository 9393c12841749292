"""One rank of several: the cases of attention whose keys and values pass round, held to one process's call of all tokens.

PyTorch's operators serve them; by interpreted_ranks.py our kernels serve two in fp32, as on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.unit.parallel import context_ranks
from tests.unit.parallel.context_ranks import CASES, Case, refused, rotated, whole

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.parallel import context_attention, positions, ring, shard
from flashmoe_science.parallel.ring import Ring

PASSED = {name: case._replace(exchange="ring") for name, case in CASES.items() if "window" not in name} | {
    "full, contiguous": Case(37, "contiguous", False, exchange="ring"),
    "full, sinks": Case(37, causal=False, sinks=True, exchange="ring"),
    "packed, sinks": Case(48, documents=(30, 5, 13), sinks=True, softcap=3.0, exchange="ring"),
    "packed, no document in two chunks": Case(180, documents=(30, 17, 90, 43), heads=(16, 4), exchange="ring"),
    "packed, short documents": Case(48, causal=False, documents=(3,) * 16, dtype=torch.float32, exchange="ring"),
    "one key head": Case(37, heads=(3, 1), exchange="ring"),
}
INTERPRETED = {
    "packed, no document in two chunks": Case(48, documents=(12, 7, 5, 24), dtype=torch.float32, exchange="ring"),
    "plain": Case(40, dtype=torch.float32, batch=2, exchange="ring"),
    "packed, sinks": Case(48, documents=(30, 5, 13), sinks=True, dtype=torch.float32, exchange="ring"),
}


def faults(case: Case, group: dist.ProcessGroup) -> list[str]:
    """As of ``context_ranks``; of fp64 with log-sum-exps in fp64, where users have fp32."""
    if case.dtype != torch.float64:
        return context_ranks.faults(case, group)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return context_ranks.faults(case, group)


def check_mistakes(group: dist.ProcessGroup) -> list[str]:
    """Mistakes are noticed by these very tests, on some rank."""

    def again(cut: Any, sent: list[torch.Tensor], rank: int) -> Any:
        """The block that is here once more, of another rank's tokens as it may be."""
        return ring._Coming(group, sent, sent, [])

    def backwards(self: Ring, rank: int, parts: Any = Ring.parts) -> Any:
        return parts(self, (2 * group.rank() - rank) % group.size())

    def added(total: torch.Tensor, lse: torch.Tensor, *of_part: Any, merge: Any = ring._merge) -> None:
        merge(total, torch.zeros_like(lse), *of_part)

    def sinks_each_time(self: Ring, part: Any, qkv: Any, sinks: Any, call: Any = Ring.call) -> Any:
        return call(self, part, qkv, torch.zeros(qkv[0].shape[-2], dtype=qkv[0].dtype))

    def of_keys_twice(*given: Any, gradients: Any = ring._gradients) -> Any:
        dq, dk, *rest = gradients(*given)
        return [dq, 2.0 * dk, *rest]

    mistakes: dict[str, tuple[object, str, Callable[..., Any], str]] = {
        "a block twice": (ring, "_passed", again, "out is off"),
        "ranks in the other direction": (Ring, "parts", backwards, "out is off"),
        "no weights in a merge": (ring, "_merge", added, "out is off"),
        "a sink with each block": (Ring, "call", sinks_each_time, "out is off"),
        "gradients of keys twice": (ring, "_gradients", of_keys_twice, "dk is off"),
    }
    missed = []
    for name, (place, member, mistake, words) in mistakes.items():
        if name == "ranks in the other direction" and group.size() == 2:
            continue  # there is one direction
        with mock.patch.object(place, member, mistake):
            found = faults(Case(48, batch=2, exchange="ring"), group)  # as many on each of 2, 3, 4, or 8 ranks
        everyones: list[list[str]] = [found] * group.size()
        dist.all_gather_object(everyones, found, group=group)
        missed += [] if words in str(everyones) else [f"{name} is not noticed"]
    return missed


def check_positions(group: dist.ProcessGroup) -> list[str]:
    """Rotated shards give what the rotated sequence gives; positions that are not permuted do not."""
    q, k, v, *_ = Case(37, batch=2).inputs()
    right = shard(whole(Case(37, batch=2), *(rotated(one, torch.arange(37)) for one in (q, k)), v, None), 1, group)
    own = positions(37, group)
    errors = []
    for at in (own, torch.arange(len(own))):
        own_q, own_k = (rotated(shard(one, 1, group), at) for one in (q, k))
        out = context_attention(own_q, own_k, shard(v, 1, group), group=group, seqlen=37, causal=True, exchange="ring")
        errors.append(float((out - right).abs().max()))
    wrong = [] if errors[0] < 1e-6 else ["positions are wrong"]
    return wrong if errors[1] > 1e-3 else [*wrong, "positions that are not permuted are not noticed"]


def check_memory(group: dist.ProcessGroup) -> list[str]:
    """Of the others' keys a rank receives one rank's at a time, all of them once, and keeps none for the backward."""
    ranks, received, batch = group.size(), [], dist.batch_isend_irecv

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        received.append([one.tensor.shape[1] for one in messages if one.op is dist.irecv])
        return batch(messages)

    q, k = torch.randn(1, 16, 4, 8, requires_grad=True), torch.randn(1, 16, 2, 8)
    kept = []
    with (
        mock.patch.object(dist, "batch_isend_irecv", counted),
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one),
    ):
        out = context_attention(q, k, k, group=group, causal=True, exchange="ring")
    wrong = [] if received == [[16, 16]] * (ranks - 1) else [f"{received} rows are received"]
    sizes = {tuple(one.shape) for one in (q, k, out)} | {(1, 4, 16)}
    return wrong if {tuple(one) for one in kept} == sizes else [*wrong, f"{kept} is kept"]


def check_refusals(group: dist.ProcessGroup) -> list[str]:
    q = torch.randn(1, 16, 2, 8)
    call = partial(context_attention, q, q, q, group=group, exchange="ring")
    wrong = refused(partial(call, causal=True, window_size=(3, 0)), "exchange is 'ring' and there is a window")
    wrong += refused(partial(call, window_size=(-1, 2)), "exchange is 'ring' and there is a window")
    other = "it must be the same on every rank"
    return wrong + refused(partial(call, exchange="ring" if group.rank() == 1 else "keys"), other)


def check_groups(group: dist.ProcessGroup) -> list[str]:
    """A group of one rank, which has nobody to send to; ranks in an order of their own."""
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    some = dist.new_group([*range(1, group.size())])
    wrong = faults(PASSED["odd"], alone)
    return wrong + faults(PASSED["odd"], some) if group.rank() else wrong


def found(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What is wrong, by case."""
    results = {f"{name}, passed": faults(case, group) for name, case in PASSED.items()}
    checks = [check_mistakes, check_positions, check_memory, check_refusals, check_groups]
    return results | {f"ring, {check.__name__}": check(group) for check in checks}


def by_our_kernels(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What is wrong with results and gradients by the kernels that a GPU would be served by."""
    torch.use_deterministic_algorithms(True)  # which asks for our backward
    wrong = {}
    for name, case in INTERPRETED.items():
        with assume(gpu_named("a100")), mock.patch.object(ring, "OPERATOR", wraps=ring.OPERATOR) as operator:
            wrong[name] = context_ranks.faults(case, group)
        wrong[name] += [] if operator.call_count else ["PyTorch's operators served the backward"]
    return wrong


def main(group: dist.ProcessGroup, file: str) -> None:
    results = by_our_kernels(group)
    assert not any(results.values()), results
    dist.barrier(group)
    os._exit(0)
