"""Experts over one dimension of a mesh and FSDP2 over the other: results, gradients and checkpoints on other meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flashmoe_science import fused_moe, route
from flashmoe_science.parallel import ExpertWorkspace, expert_parallel_moe

EXPERTS, DIM, HIDDEN, TOP_K, TOKENS = 8, 32, 16, 2, 6  # tokens of a rank


class Layer(nn.Module):
    """A router, and experts on the ranks of a mesh; of all experts without one."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = (EXPERTS, DIM), (EXPERTS, 2 * HIDDEN, DIM), (EXPERTS, DIM, HIDDEN)
        router, *weights = (torch.randn(shape, generator=draw) * 0.2 for shape in shapes)
        if mesh is not None:
            weights = [distribute_tensor(one, mesh, [Shard(0)]) for one in weights]
        self.router = nn.Parameter(router)
        self.experts = nn.ParameterList(weights)
        self.workspace = None if mesh is None else ExpertWorkspace(mesh, TOKENS, DIM, TOP_K, EXPERTS, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (x, *self.experts, *route(x @ self.router.T, TOP_K))
        return fused_moe(*given) if self.workspace is None else expert_parallel_moe(*given, workspace=self.workspace)


def whole(one: Any) -> torch.Tensor:
    gathered: torch.Tensor = one.full_tensor() if isinstance(one, DTensor) else one
    return gathered


def faults(group: dist.ProcessGroup, folder: str) -> list[str]:
    """What is wrong with two by N / 2 ranks, whose tokens differ."""
    rank, ranks = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("fsdp", "ep"))
    x = torch.randn(ranks * TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    own, neighbours = x.chunk(ranks)[rank], x.chunk(2)[rank // (ranks // 2)]
    plain, layer = Layer(), fully_shard(Layer(mesh["ep"]), mesh=mesh["fsdp"])
    plain(x).square().sum().backward()
    out = layer(own)
    out.square().sum().backward()
    right = plain(neighbours).chunk(ranks // 2)[rank % (ranks // 2)]
    wrong = [] if torch.equal(out, right) else ["the result is not one process's"]
    for one, of_all in zip(layer.experts, plain.experts, strict=True):
        # FSDP2 takes the mean of its two ranks' gradients.
        wrong += [] if torch.allclose(2 * whole(one.grad), of_all.grad, atol=1e-6) else ["a gradient is not one process's"]
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    other = Layer(init_device_mesh("cpu", (ranks,)))
    state = {name: torch.zeros_like(one) for name, one in other.state_dict().items()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    right = plain(x).chunk(ranks)[rank]
    return wrong + ([] if torch.equal(other(own), right) else ["a checkpoint on another mesh gives another result"])
