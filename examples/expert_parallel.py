"""A mixture-of-experts layer whose experts are spread over ranks, trained on tokens of each rank; on GPUs, or on the CPU.

torchrun --nproc-per-node 2 examples/expert_parallel.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from flashmoe_science import fused_moe, route
from flashmoe_science.parallel import ExpertWorkspace, expert_parallel_moe

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 1000, 256, 128, 16, 4


class Experts(nn.Module):
    """A router, and the experts that are given."""

    def __init__(self, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.router, self.gate_up, self.down = (nn.Parameter(one.clone()) for one in (router, gate_up, down))

    def forward(self, x: torch.Tensor, experts: Callable[..., torch.Tensor]) -> torch.Tensor:
        weights, ids = route(x @ self.router.T, TOP_K)
        return experts(x, self.gate_up, self.down, weights, ids)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same parameters and tokens on every rank
    shapes = (EXPERTS, WIDTH), (EXPERTS, 2 * HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    router, gate_up, down = (torch.randn(shape).to(device) * shape[-1] ** -0.5 for shape in shapes)
    x = torch.randn(ranks * TOKENS, WIDTH).to(device)
    sizes = [TOKENS + 100 * (rank % 2 * 2 - 1) for rank in range(ranks - ranks % 2)] + [TOKENS] * (ranks % 2)
    tokens = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))  # ranks have different numbers of them

    workspace = ExpertWorkspace(dist.group.WORLD, TOKENS + 100, WIDTH, TOP_K, EXPERTS, x.dtype)
    if rank == 0:
        print(workspace)
    mine = slice(workspace.first_expert, workspace.first_expert + workspace.local_experts)
    layer, whole = Experts(router, gate_up[mine], down[mine]), Experts(router, gate_up, down)

    right = whole(x, fused_moe)
    (right.square().sum() / x.numel()).backward()
    wanted = [whole.router.grad, whole.gate_up.grad[mine], whole.down.grad[mine]]
    for combine in ("exact", "reduced"):
        out = layer(x[tokens], partial(expert_parallel_moe, workspace=workspace, combine=combine))
        (out.square().sum() / x.numel()).backward()  # each rank's part of the loss
        dist.all_reduce(layer.router.grad)  # as FSDP or DDP do; an expert's gradient is of all ranks' tokens already
        found = [layer.router.grad, layer.gate_up.grad, layer.down.grad]
        for one, other in zip([out, *found], [right[tokens], *wanted], strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4 * other.abs().max().item())
        same = "bits" if torch.equal(out, right[tokens]) else "values"
        held = f"{combine}: {len(out)} of {len(x)} tokens, {same} and gradients as of the whole"
        print(f"rank {rank} of {ranks} on {device}, {held}")
        layer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
