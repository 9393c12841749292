"""A layer of causal attention with rotary embeddings, trained on a sequence that is cut over ranks; on GPUs, or on the CPU.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from flashmoe_science import flash_attn_func
from flashmoe_science.parallel import context_attention, positions, shard

SEQLEN, HEADS, WIDTH = 1000, 4, 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, at: torch.Tensor, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        """x [B, S, WIDTH] of the tokens at the positions ``at`` [S]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.out(attention(rotated(q, at), rotated(k, at), v, causal=True).flatten(2))


def rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turns = at[:, None, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    one, other = x.split(half, -1)
    return torch.cat((one * turns.cos() - other * turns.sin(), one * turns.sin() + other * turns.cos()), -1)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = dist.group.WORLD
    torch.manual_seed(0)  # the same parameters and tokens on every rank
    layer, x = Attention().to(device), torch.randn(1, SEQLEN, WIDTH).to(device)

    attention = partial(context_attention, group=group, seqlen=SEQLEN)
    out = layer(shard(x, 1, group), positions(SEQLEN, group, device=device), attention)
    (out.square().sum() / x.numel()).backward()  # each rank's part of the loss
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)  # as FSDP or DDP do
    found = [out.detach(), *(parameter.grad.clone() for parameter in layer.parameters())]

    layer.zero_grad()
    whole = layer(x, torch.arange(SEQLEN, device=device), flash_attn_func)
    whole.square().mean().backward()
    right = [shard(whole.detach(), 1, group), *(parameter.grad for parameter in layer.parameters())]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4 * other.abs().max().item())
    print(f"rank {rank} of {ranks} on {device}: {out.shape[1]} of {SEQLEN} tokens, output and gradients as of the whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
