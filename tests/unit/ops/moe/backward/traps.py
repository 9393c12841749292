"""What backwards of experts of others got wrong (a script for Triton's interpreter): prints what is wrong by trap.

Each trap calls the public functions with the backward's kernel that is named, and is given to PyTorch's operators and to a GPU
too (test_traps.py). They are numbered on from attention's twenty; in brackets are the issues that report them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.unit.ops.moe.backward.cases import Poison, poisoned
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume

E, H, F, K, T = 5, 16, 24, 2, 9
Tensors = list[torch.Tensor]


class Place:
    """Where a trap's tensors are, and what serves them."""

    def __init__(self, device: str = "cpu", kernel: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.kernel, self.dtype = device, kernel, dtype

    def leaves(self, tokens: int = T) -> Tensors:
        """x, w1, w2 and routing weights."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((tokens, H), (E, 2 * F, H), (E, H, F))
        made = [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
        of_weights = torch.rand((tokens, K), generator=generator)
        return [*(self.put(one.to(self.dtype)).requires_grad_() for one in made), self.put(of_weights).requires_grad_()]

    def put(self, one: torch.Tensor) -> torch.Tensor:
        return one.to(self.device)

    def experts(self, leaves: Tensors, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return fm.fused_moe(*leaves, self.put(ids), kernel=self.kernel, **options)

    def gradients(self, leaves: Tensors, ids: torch.Tensor, **options: Any) -> Tensors:
        out = self.experts(leaves, ids, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)]


def ids_of(experts: int, tokens: int = T) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(experts, generator=generator)[:K] for _ in range(tokens)])


def differ(name: str, got: Tensors, right: Tensors, exact: bool = True) -> Iterator[str]:
    relative = 2.0**-6 if min(one.dtype.itemsize for one in got) == 2 else 3e-5  # fp32 gradients come of what 16 bits round
    for nth, (one, other) in enumerate(zip(got, right, strict=True)):
        error = (one.float() - other.float()).abs().max() if one.numel() else torch.zeros(())
        allowed = 0.0 if exact else relative * other.float().abs().max()
        if not error <= allowed:
            yield f"{name}: tensor {nth} differs by {error.item()}"


def empty_experts(place: Place) -> Iterator[str]:
    """21. The gradient of an expert without tokens is written, and 0 (MSLK #158, torch #172439)."""
    for used in (1, 3):
        ids = torch.zeros(T, K, dtype=torch.long) if used == 1 else ids_of(3)
        for options in ({}, {"recompute": True}):
            _, *made = place.gradients(place.leaves(), ids, **options)
            yield from (f"{used} used: gradient {nth} is no number" for nth, one in enumerate(made) if not one.isfinite().all())
            for of_weights in made[1:3]:
                if of_weights[used:].any() or not of_weights[:used].any():
                    yield f"{used} used: a gradient of an expert without tokens is not 0"


def rows_past_the_last(place: Place) -> Iterator[str]:
    """22. Rows that no rank filled, NaN, beyond an expert parallel rank's own: nothing of them at any step (torch #193633)."""
    offsets = torch.tensor([3, 3, 4, 7, 7])
    trained = []
    for rows in (7, T):
        x, *weights, _ = place.leaves()
        with torch.no_grad():
            x[7:] = torch.nan
        for _ in range(3):
            out = fm.grouped_moe(x[:rows], *weights, place.put(offsets), kernel=place.kernel)
            made = torch.autograd.grad(out.float().square().sum(), [x, *weights])
            with torch.no_grad():
                for one, gradient in zip((x, *weights), made, strict=True):
                    one -= 0.1 * gradient
        if out[7:].any() or made[0][7:].any():
            yield "rows past the last are not 0"
        trained.append([x[:7].detach(), *(one.detach() for one in weights)])
    yield from differ("three steps", trained[1], trained[0], exact=False)


def router_over_ranks(place: Place) -> Iterator[str]:
    """22. The sum over ranks of what each gives to the router, of its experts alone, is the router's gradient
    (transformers #48205)."""
    leaves, ids = place.leaves(), ids_of(E)
    whole = place.gradients(leaves, ids)
    ranks = []
    for first, end in ((0, 2), (2, E)):
        x, w1, w2, weights = leaves
        here = ids - first
        mine = torch.where((here >= 0) & (here < end - first), here, end - first)  # transformers marks others by the count
        out = place.experts([x, w1[first:end], w2[first:end], weights], mine)
        ranks.append((out, out))
    total = ranks[0][0] + ranks[1][0]
    made = torch.autograd.grad(total.float().square().sum(), leaves)
    yield from differ("two ranks", [total, *made], whole, exact=False)


def far(place: Place) -> Iterator[str]:
    """23. Rows, experts and sums that begin past the reach of 32 bits (Liger #1246, #1248)."""
    right, ids = place.gradients(place.leaves(), ids_of(E)), ids_of(E)
    for nth, name in enumerate(("x", "w1", "w2")):
        leaves = place.leaves()
        leaves[nth] = apart(leaves[nth]).requires_grad_()
        yield from differ(name, place.gradients(leaves, ids), right, exact=False)
    sums = tuple(apart(torch.zeros_like(one)) for one in place.leaves()[1:3])
    place.gradients(place.leaves(), ids, weight_grads=sums)
    yield from differ("sums", [*sums], right[2:4], exact=False)


def apart(one: torch.Tensor) -> torch.Tensor:
    """The same in memory of which the first dimension's last element begins past 2^31 elements. The elements lie multiples of
    their own size apart: kernels that copy blocks of a dense tensor can copy this one's too."""
    count, unit = len(one), 8 * one[0].numel()
    step = (2**31 // (count - 1) // unit + 1) * unit
    strides = (step, *one.stride()[1:])
    memory = torch.empty((count - 1) * step + one[0].numel(), dtype=one.dtype, device=one.device)
    return memory.as_strided(one.shape, strides).copy_(one.detach())


def counters(place: Place) -> Iterator[str]:
    """24. Counters and tables of one call have no part in another: two layers' passes interleaved, steps of other routings and
    other numbers of tokens between (Liger #1398)."""
    leaves, first, second = place.leaves(), ids_of(E), ids_of(3)
    alone = [place.gradients(leaves, ids) for ids in (first, second)]
    outs = [place.experts(leaves, ids) for ids in (first, second)]
    place.gradients(place.leaves(3), ids_of(E, 3))
    for out, right in zip(outs[::-1], alone[::-1], strict=True):
        made = torch.autograd.grad(out.float().square().sum(), leaves)
        yield from differ("interleaved", [out, *made], right)


def ties(place: Place) -> Iterator[str]:
    """25. A choice that is made again, under checkpointing, of logits many of which are equal, is the first one; also where
    scores rounded to bf16 are equal."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 2, (T, E), generator=generator) + 2.0**-12 * torch.rand(T, E, generator=generator).round()
    logits, leaves = place.put(logits).requires_grad_(), place.leaves()[:3]

    def layer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = fm.route(logits, K, normalize="sum")
        return fm.fused_moe(x, *leaves[1:], weights, ids, kernel=place.kernel)

    right = layer(leaves[0], logits)
    want = torch.autograd.grad(right.float().square().sum(), [*leaves, logits])
    again = checkpoint(layer, leaves[0], logits, use_reentrant=False)
    yield from differ("again", [again, *torch.autograd.grad(again.float().square().sum(), [*leaves, logits])], [right, *want])
    best = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :K]
    if not torch.equal(fm.route(logits, K)[1].long(), best):
        yield "of equal logits not the first are chosen"


Trap = Callable[[Place], Iterator[str]]
TRAPS: tuple[Trap, ...] = (empty_experts, rows_past_the_last, router_over_ranks, far, counters, ties)
NAMES = [trap.__name__ for trap in TRAPS]


def complaints(trap: Trap, place: Place) -> list[str]:
    """What is wrong, by cached launches and in memory full of NaN, of which those beyond 32 bits would fill too much."""
    found = [*trap(place)]
    if trap is not far:
        before = Poison.filled
        with poisoned():
            found += [f"in memory full of NaN, {one}" for one in trap(place)]
        if place.kernel is not None and Poison.filled == before:
            found.append("no memory was filled with NaN")
    return found


def main() -> None:
    with assume(gpu_named("a100")):
        print(json.dumps(complaints(TRAPS[NAMES.index(sys.argv[1])], Place(kernel="moe_bwd_triton"))))


if __name__ == "__main__":
    main()
