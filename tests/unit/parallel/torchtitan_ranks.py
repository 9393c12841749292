"""One rank of several: a layer of torchtitan's shape whose experts are on the ranks by either override, held to one
process's."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from tests.unit.parallel import torchtitan_double as double
from tests.unit.parallel.context_ranks import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

DIM, HIDDEN, TOP_K, TOKENS = 16, 24, 2, 7
OURS = "flashmoe_science.integrations.torchtitan"


def layer(ranks: int, dispatcher: type) -> double.MoE.Config:
    experts = double.GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=2 * ranks)
    return double.MoE.Config(
        routed_experts=double.RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=dispatcher(num_experts=2 * ranks, top_k=TOP_K)
        )
    )


def faults(whole: double.MoE, spread: double.MoE, everyones: torch.Tensor, rank: int) -> list[str]:
    """What is wrong with this rank's result and gradients; everyones: [ranks, tokens, DIM]."""
    own, all_tokens = (one.detach().clone().requires_grad_() for one in (everyones[rank], everyones.flatten(0, 1)))
    out, right = spread(own), whole(all_tokens)
    loss = torch.cos(torch.arange(right.numel(), dtype=right.dtype)).view_as(everyones)
    leaves = [own, *spread.parameters()]
    gradients = torch.autograd.grad((out * loss[rank]).sum(), leaves)
    again = torch.autograd.grad((spread(own) * loss[rank]).sum(), leaves)
    references = torch.autograd.grad((right * loss.flatten(0, 1)).sum(), [all_tokens, *whole.parameters()])
    pairs = {"the result": (out.detach(), right.detach().view_as(everyones)[rank])}
    names = ["the tokens", *(name for name, _ in spread.named_parameters())]
    wrong = []
    for name, one, other, reference in zip(names, gradients, again, references, strict=True):
        found, second = (each.full_tensor() if isinstance(each, DTensor) else each for each in (one, other))
        wrong += [] if torch.equal(found, second) else [f"the gradient of {name} has other bits in a second call"]
        if name.startswith("gate"):
            dist.all_reduce(found)
        pairs[f"the gradient of {name}"] = found, reference.view_as(everyones)[rank] if name == "the tokens" else reference
    errors = {name: float((one.detach() - other).abs().max()) for name, (one, other) in pairs.items()}
    with torch.no_grad():
        errors["the result without gradients"] = float((spread(own) - pairs["the result"][1]).abs().max())
    return wrong + [f"{name} is off by {error}" for name, error in errors.items() if not error < 1e-12]


def spread_of(whole: double.MoE, config: double.MoE.Config, mesh: Any) -> double.MoE:
    """The layer by another configuration, with the parameters of the whole one, its experts on ranks."""
    spread: double.MoE = config.build().double()
    spread.load_state_dict(deepcopy(whole.state_dict()))
    inner = spread.routed_experts.inner_experts
    for name, one in list(inner.named_parameters()):
        setattr(inner, name, nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)])))
    spread.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return spread


def check_mistakes(whole: double.MoE, make: Callable[[], double.MoE], everyones: torch.Tensor, rank: int) -> list[str]:
    """Mistakes in a dispatcher are noticed by these very tests."""
    missed = []
    for mistake in ("rows in another order", "scores twice", "the last row left out"):
        spread = make()
        dispatcher = spread.routed_experts.token_dispatcher
        combine = dispatcher.combine

        def wrong(rows: torch.Tensor, routing: Any, x: torch.Tensor, mistake: str = mistake, combine: Any = combine) -> Any:
            if mistake == "scores twice":
                routing = routing._replace(weights=routing.weights.square())
            elif mistake == "rows in another order":
                rows = rows.roll(1, 0)
            else:
                rows = torch.cat((rows[:-1], torch.zeros_like(rows[:1])))
            return combine(rows, routing, x)

        dispatcher.combine = wrong
        found = [faults(whole, spread, everyones, rank)]
        everyones_found = [found] * dist.get_world_size()
        dist.all_gather_object(everyones_found, found[0])
        missed += [] if any("the result is off" in str(one) for one in everyones_found) else [f"{mistake} is not noticed"]
    return missed


def main(group: dist.ProcessGroup, file: str) -> None:
    rank, ranks = group.rank(), group.size()
    double.install()
    from flashmoe_science.integrations import torchtitan

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    whole: double.MoE = layer(ranks, double.LocalTokenDispatcher.Config).build().double()
    for one in whole.parameters():
        nn.init.normal_(one, std=0.5)
    plain, found = layer(ranks, double.BaseEPTokenDispatcher.Config), {}
    batches = {
        "drawn": torch.randn(ranks, TOKENS, DIM, dtype=torch.float64),
        "other tokens": torch.randn(ranks, 1, DIM, dtype=torch.float64),
        "alike, so that some ranks have no rows": torch.ones(ranks, 3, DIM, dtype=torch.float64),
    }
    for name, combine in product(("token_dispatcher", "routed_experts"), ("exact", "reduced")):
        spread = spread_of(whole, double.overridden(f"{OURS}.{name}", plain, combine=combine), mesh)
        for kind, everyones in batches.items():
            found[f"{name}, {combine}, {kind}"] = faults(whole, spread, everyones, rank)
    config = double.overridden(f"{OURS}.token_dispatcher", plain)
    found["mistakes"] = check_mistakes(whole, lambda: spread_of(whole, config, mesh), batches["drawn"], rank)
    spread = spread_of(whole, config, mesh)
    spread.routed_experts.inner_experts.forward = lambda rows, counts: rows[:, 1:]
    found["refusals"] = refused(lambda: spread(batches["drawn"][rank]), "the experts' results have shape")
    found["refusals"] += refused(
        lambda: spread.routed_experts.token_dispatcher.wire_meshes(ep_mesh=None), "must be more than 1"
    )

    class Others(double.GroupedExperts):
        class Config(double.GroupedExperts.Config):
            pass

    others = Others.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=2 * ranks)
    dispatcher = torchtitan.TokenDispatcher.Config(num_experts=2 * ranks, top_k=TOP_K)
    build = torchtitan.Experts.Config(inner_experts=others, token_dispatcher=dispatcher).build
    found["refusals"] += refused(build, "experts are Others, and only GroupedExperts are computed")
    assert not any(found.values()), found
    dist.barrier()
    os._exit(0)
