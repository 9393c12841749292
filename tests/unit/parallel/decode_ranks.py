"""One rank of several: decoding with a cache that is spread over ranks, held to ``flash_attn_with_kvcache`` of one cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.unit.parallel.context_ranks import refused

from flashmoe_science import flash_attn_with_kvcache
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.parallel import DecodeWorkspace, context_decode

LENGTHS, CAPACITY, HEADS, KV_HEADS, DIM, PAGE = (0, 1, 2, 3, 17, 40, 29), 48, 4, 2, 32, 8


class Case(NamedTuple):
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    softcap: float = 0.0
    new: bool = False
    rotary: bool = False
    paged: bool = False
    queries: int = 1


CASES = {
    "a cache": Case(),
    "sinks": Case(sinks=True),
    "soft cap": Case(softcap=2.0),
    "a new token": Case(new=True),
    "a new token, rotary": Case(new=True, rotary=True, sinks=True),
    "pages": Case(new=True, paged=True),
    "bf16": Case(torch.bfloat16, new=True, rotary=True),
    "queries": Case(queries=3),  # of sequences of 0, 1 and 2 tokens too
    "queries, new tokens, rotary": Case(new=True, rotary=True, sinks=True, queries=5),
    "queries, new tokens, pages": Case(torch.bfloat16, new=True, rotary=True, paged=True, queries=4),
}


class Inputs(NamedTuple):
    """The same on every rank: caches of whole sequences."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    options: dict[str, Any]

    def double(self) -> Inputs:
        tensors = [one.double() for one in self[:5]]
        wide = {
            name: one.double() if isinstance(one, torch.Tensor) and name == "s_aux" else one
            for name, one in self.options.items()
        }
        return Inputs(*tensors, self.lengths, wide)


def inputs_of(case: Case) -> Inputs:
    draw = torch.Generator().manual_seed(3)
    batch = len(LENGTHS)
    of_new = (batch, case.queries, KV_HEADS, DIM)
    shapes = [(batch, case.queries, HEADS, DIM), *[(batch, CAPACITY, KV_HEADS, DIM)] * 2, of_new, of_new]
    tensors = [torch.randn(shape, generator=draw).to(case.dtype) for shape in shapes]
    options: dict[str, Any] = {"softcap": case.softcap}
    if case.sinks:
        options["s_aux"] = torch.randn(HEADS, generator=draw)
    if case.rotary:
        angles = torch.outer(torch.arange(CAPACITY), 100.0 ** -torch.arange(0.0, 1.0, 2 / DIM))
        options |= {"rotary_cos": angles.cos().to(case.dtype), "rotary_sin": angles.sin().to(case.dtype)}
    return Inputs(*tensors, torch.tensor(LENGTHS, dtype=torch.int32), options)


def whole(case: Case, given: Inputs) -> torch.Tensor:
    """One cache's call."""
    new = {"k": given.k, "v": given.v} if case.new else {}
    return flash_attn_with_kvcache(
        given.q, given.k_cache.clone(), given.v_cache.clone(), cache_seqlens=given.lengths, causal=True, **new, **given.options
    )


def own_caches(case: Case, given: Inputs, rank: int, ranks: int) -> dict[str, Any]:
    """This rank's caches, NaN where it has no token."""
    caches = {}
    for name in ("k_cache", "v_cache"):
        dense = torch.full((len(LENGTHS), CAPACITY, KV_HEADS, DIM), torch.nan, dtype=case.dtype)
        for row, length in enumerate(LENGTHS):
            tokens = getattr(given, name)[row, rank:length:ranks]
            dense[row, : len(tokens)] = tokens
        caches[name] = dense.flatten(0, 1).unflatten(0, (-1, PAGE)) if case.paged else dense
    table = torch.arange(len(LENGTHS) * CAPACITY // PAGE, dtype=torch.int32).view(len(LENGTHS), -1)
    return caches | ({"page_table": table} if case.paged else {})


def faults(
    case: Case,
    group: dist.ProcessGroup,
    change: Callable[..., Inputs] | None = None,
    workspace: DecodeWorkspace | None = None,
) -> list[str]:
    """What is wrong. ``change``: a mistake in what ours is given, by rank."""
    given = inputs_of(case)
    caches = own_caches(case, given, group.rank(), group.size())
    ours = given if change is None else change(given, group.rank())
    new = {"k": ours.k, "v": ours.v} if case.new else {}
    options = {"group": group, "cache_seqlens": ours.lengths, "workspace": workspace, **new, **ours.options}
    out = context_decode(ours.q, **caches, **options)
    gathered = [torch.empty_like(out) for _ in range(group.size())]
    dist.all_gather(gathered, out, group=group)
    wrong = [] if all(torch.equal(out, one) for one in gathered) else ["ranks have other bits"]
    if case.new:  # written once, on its rank
        dense = caches["k_cache"].reshape(len(LENGTHS), CAPACITY, KV_HEADS, DIM)
        held = [int(dense[row, :, 0, 0].isfinite().sum()) for row in range(len(LENGTHS))]
        if held != [len(range(group.rank(), length + case.queries, group.size())) for length in LENGTHS]:
            wrong.append(f"the caches have {held} tokens")
    reference, plain = whole(case, given.double()), whole(case, given)
    return wrong + check_output("out", out, expected([reference], [plain], None)[0])[1]


def check_mistakes(group: dist.ProcessGroup) -> list[str]:
    """Mistakes are noticed by these very tests."""
    missed = []
    for case, change in (
        # a sink that counts on each rank; lengths of ranks for those of sequences; another sequence's token
        (
            CASES["sinks"],
            lambda given, rank: given._replace(options={**given.options, "s_aux": given.options["s_aux"] + log(group.size())}),
        ),
        (CASES["a cache"], lambda given, rank: given._replace(lengths=given.lengths.clamp(max=7))),
        (CASES["a new token"], lambda given, rank: given._replace(k=given.k.flip(0))),
        (CASES["queries, new tokens, rotary"], lambda given, rank: given._replace(k=given.k.flip(1))),
    ):
        if not any("out" in one for one in faults(case, group, change)):
            missed.append(f"a mistake is not noticed in {case}")
    return missed


def check_empty(group: dist.ProcessGroup) -> list[str]:
    """What is wrong with a batch of no sequences."""
    given = inputs_of(CASES["a new token"])
    q, *others = (one[:0] for one in given[:5])
    out = context_decode(q, *others, group=group, cache_seqlens=given.lengths[:0])
    return [] if out.shape == q.shape and out.dtype == q.dtype else [f"its result is {out}"]


def check_refusals(group: dist.ProcessGroup) -> list[str]:
    given, rank = inputs_of(CASES["a cache"]), group.rank()
    arguments: dict[str, Any] = {
        "q": given.q,
        "k_cache": given.k_cache,
        "v_cache": given.v_cache,
        "cache_seqlens": given.lengths,
    }
    wrong, caches, longest = [], ("k_cache", "v_cache"), given.lengths.clone()
    longest[3] = 500
    for words, more in (
        ("q has 0 queries a sequence; it must have at least 1", {"q": given.q[:, :0]}),
        (
            "k has shape (7, 1, 2, 32) on cpu; it must be (7, 2, 2, 32)",
            {"q": given.q.repeat(1, 2, 1, 1), "k": given.k, "v": given.v},
        ),
        ("k is None and rotary_cos is given", {"q": given.q.repeat(1, 2, 1, 1), "rotary_cos": torch.ones(64, 8)}),
        ("cache_seqlens is None", {"cache_seqlens": None}),
        ("cache_seqlens is [1, 2, 3, 4, 18, 41, 30] on rank 1", {"cache_seqlens": given.lengths + (rank == 1)}),
        ("context_decode has none", {"q": given.q.clone().requires_grad_()}),
        ("group is None", {"group": None}),
        ("k_cache has 3 dimensions", {"k_cache": given.k_cache[0]}),
        ("cache_seqlens has", {"cache_seqlens": given.lengths[1:]}),
        ("v is None and k is given", {"k": given.k}),
        ("v is None and k is given", {"q": given.q.repeat(1, 2, 1, 1), "k": given.k.repeat(1, 2, 1, 1)}),
        ("k has shape (7, 1, 4, 32) on cpu; it must be (7, 1, 2, 32) on cpu", {"k": given.q, "v": given.v}),
        ("v has shape (6, 1, 2, 32)", {"k": given.k, "v": given.v[1:]}),
        ("k is None and rotary_cos is given", {"rotary_cos": torch.ones(64, 8), "rotary_sin": torch.ones(64, 8)}),
        ("cache_seqlens is 500 for sequence 3, of which rank", {"cache_seqlens": longest}),
        ("cache_seqlens is -2 for sequence 0; it must be at least 0", {"cache_seqlens": given.lengths - 2}),
        ("rotary_cos is a list; it must be a torch.Tensor", {"k": given.k, "v": given.v, "rotary_cos": [1], "rotary_sin": [1]}),
        ("k_cache is a NoneType; it must be a torch.Tensor", {"k_cache": None}),
        # By rank 1 alone.
        ("q is a NoneType; it must be a torch.Tensor", {"q": None if rank == 1 else given.q}),
        ("s_aux has shape (3,)", {"s_aux": torch.zeros(3 if rank == 1 else HEADS)}),
        ("it has room for 0", {name: arguments[name][:, : 0 if rank == 1 else None] for name in caches}),
        ("softmax_scale is a function", {"softmax_scale": (lambda: 1.0) if rank == 1 else None}),  # which cannot be pickled
        ("kernel is 'none'", {"kernel": "none" if rank == 1 else None}),
    ):
        wrong += refused(partial(context_decode, **{"group": group, **arguments, **more}), words)
    return wrong


def found(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What is wrong, by case."""
    results = {f"decode, {name}": faults(case, group) for name, case in CASES.items()}
    return results | {f"decode, {check.__name__}": check(group) for check in (check_mistakes, check_empty, check_refusals)}
