"""A training step of a model that FSDP2 shards over two processes: its gradients are those of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.unit.forked import on_ranks
from tests.unit.integrations.test_transformers import TOKENS, model_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fms
from flashmoe_science.dispatch.select import Decision
from flashmoe_science.integrations import transformers as integration
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.front.backward import autograd
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR

HEADS, HEADS_KV, DIM, WIDTH = 4, 2, 8, 32


class Block(nn.Module):
    """Attention with sinks, whose parameter is given to it, and a window."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {"context_fn": fms.checkpoint_context} if self.kept else {}
        made: torch.Tensor = checkpoint(self.attend, x, use_reentrant=False, **options)
        return x + made

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x).unflatten(-1, (-1, DIM)).flatten(0, 1)
        q, k, v = rows.split((HEADS, HEADS_KV, HEADS_KV), 1)
        starts = torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[1]
        out = fms.flash_attn_varlen_func(
            q, k, v, starts, starts, x.shape[1], x.shape[1], causal=True, window_size=(5, 0), s_aux=self.sinks
        )
        assert isinstance(out, torch.Tensor)
        return self.out(out.flatten(1)).view_as(x)  # type: ignore[no-any-return]


def by_our_operator() -> None:
    """Serve through ``flashmoe::attention_backward`` on the CPU too."""
    autograd.choose_backward = lambda *call: Decision("ours", Config(), "", "requested")
    autograd.is_plain = lambda *tensors: False
    autograd.OPERATOR = lambda *given: OPERATOR(*given[:10], None, *given[11:])


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    F.mse_loss(model(x), x.flip(-1)).backward()
    found = [one.grad for one in model.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found if one is not None]


def rank(number: int, store: str, kept: bool) -> None:
    torch.set_num_threads(1)
    by_our_operator()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    torch.manual_seed(1)
    model, x = nn.Sequential(Block(kept), Block(kept)), torch.randn(4, 12, WIDTH)
    expected = gradients(model, x)
    model.zero_grad()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):  # the second step is served by the launch cache
        got = gradients(model, x[2 * number : 2 * number + 2])
        model.zero_grad()
        assert len(got) == len(expected) == 6
        for one, right in zip(got, expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-6)
    dist.barrier()
    os._exit(0)  # an ordinary end aborts now and then: a thread of PyTorch's is still there ("terminate called")


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_of_two_processes_is_that_of_one(kept: bool, tmp_path: Path) -> None:
    on_ranks(2, rank, str(tmp_path / "store"), kept)


def of_rows(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a model of transformers."""
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


def rank_of_transformers(number: int, store: str, family: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    integration.register()
    expected, model = of_rows(model_of(family, "eager").train(), TOKENS), model_of(family, "fms").train()
    model.set_attn_implementation("fms")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        got = of_rows(model, TOKENS[number : number + 1])
        assert got.keys() == expected.keys()
        for name, one in got.items():
            torch.testing.assert_close(one, expected[name], rtol=1e-3, atol=1e-5, msg=f"{name} differs")
    dist.barrier()
    os._exit(0)  # as above


@pytest.mark.parametrize("family", ["qwen3-moe", pytest.param("gpt-oss", marks=[pytest.mark.slow, pytest.mark.redundant])])
def test_a_step_of_a_model_of_transformers_is_that_of_eager(family: str, tmp_path: Path) -> None:
    on_ranks(2, rank_of_transformers, str(tmp_path / "store"), family)
