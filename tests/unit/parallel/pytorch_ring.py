"""PyTorch's ``context_parallel`` by our kernels: its ring calls the flash backend, which ours serve while active.

torchrun --nproc-per-node 2 -m tests.unit.parallel.pytorch_ring
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.unit.integrations.test_torch_sdpa_on_gpu import is_ours, kernels
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science.integrations import torch_sdpa


def trained(qkv: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    leaves = [one.detach().requires_grad_() for one in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def in_ring(mesh: DeviceMesh, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Results of the whole sequence, and the names of the kernels that this rank ran."""
    own = [one.clone() for one in given]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=own, buffer_seq_dims=[2] * len(own)):
        *qkv, gradient = own
        found = trained(qkv, gradient)
        names = kernels(lambda: trained(qkv, gradient))
        return context_parallel_unshard(mesh, found, [2] * len(found)), names


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    draw = torch.Generator("cuda").manual_seed(0)
    given = [torch.randn(1, 8, 2048, 128, generator=draw, device="cuda").bfloat16() for _ in range(4)]
    right = trained(given[:3], given[3])
    before = in_ring(mesh, given)[1]
    assert "pytorch_flash" in before, before
    with torch_sdpa.activated():
        found, names = in_ring(mesh, given)
    assert is_ours(names), names
    print(f"rank {dist.get_rank()}: {names}")
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
        error = ((one.float() - other.float()).norm() / other.float().norm()).item()
        assert error < 0.01, f"{name} is off by {error} of its norm"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
