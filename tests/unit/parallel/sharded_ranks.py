"""Experts over one dimension of a mesh and FSDP2 over the other: results, gradients and checkpoints on other meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flashmoe_science import flash_attn_func, fused_moe, route
from flashmoe_science.parallel import ExpertWorkspace, context_attention, expert_parallel_moe, shard

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


class Block(nn.Module):
    """Attention of sequences that the ranks of a group share, then experts on the ranks of a mesh; of whole ones without."""

    def __init__(self, group: DeviceMesh | None = None, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(2)
        self.qkv, self.layer = nn.Parameter(torch.randn(3 * DIM, DIM, generator=draw) * 0.2), Layer(mesh)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = (x @ self.qkv.T).view(*x.shape[:2], 3, 2, DIM // 2).unbind(2)
        attend = flash_attn_func if self.group is None else partial(context_attention, group=self.group)
        out: torch.Tensor = self.layer((x + attend(*qkv, causal=True).flatten(2)).flatten(0, 1))
        return out.view(x.shape)


def whole(one: Any) -> torch.Tensor:
    gathered: torch.Tensor = one.full_tensor() if isinstance(one, DTensor) else one
    return gathered


def block_faults(group: dist.ProcessGroup) -> list[str]:
    """What is wrong with attention, experts and FSDP2 on the same ranks: each of two sequences is on half of them."""
    rank, half = group.rank(), group.size() // 2
    context, mesh = (init_device_mesh("cpu", (2, half), mesh_dim_names=("fsdp", name)) for name in ("cp", "ep"))
    x = torch.randn(2, half * TOKENS, DIM, generator=torch.Generator().manual_seed(3))
    plain, block = Block(), Block(context["cp"], mesh["ep"])
    fully_shard(block.layer, mesh=mesh["fsdp"])
    fully_shard(block, mesh=mesh._flatten("all"))
    right = plain(x)
    right.square().sum().backward()
    out = block(shard(x[rank // half, None], 1, block.group))
    out.square().sum().backward()
    near = torch.allclose(out, shard(right[rank // half, None], 1, block.group), atol=1e-5)
    wrong = [] if near else ["the result of a block is not one process's"]
    pairs = [(group.size(), block.qkv, plain.qkv)]  # FSDP2 takes the mean of its ranks' gradients
    pairs += [(2, one, of_all) for one, of_all in zip(block.layer.experts, plain.layer.experts, strict=True)]
    same = [torch.allclose(ranks * whole(one.grad), of_all.grad, atol=1e-4) for ranks, one, of_all in pairs]
    return wrong if all(same) else [*wrong, f"gradients of a block are one process's: {same}"]


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
    wrong += block_faults(group)
    return wrong + ([] if torch.equal(other(own), right) else ["a checkpoint on another mesh gives another result"])
