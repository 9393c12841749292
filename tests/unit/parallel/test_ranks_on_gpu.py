"""Ranks that are GPUs of one host, two or four: the examples by NCCL, and what is read from the other GPUs' memory.

torchrun --nproc-per-node 2 -m tests.unit.parallel.test_ranks_on_gpu

The first calls build some thirty kernels, on each rank by itself: rank 0 prints how far it is, and which calls take long.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.unit.parallel.killed_rank import WHATS

from flashmoe_science import flash_attn_func, flash_attn_with_kvcache
from flashmoe_science.parallel import (
    ContextWorkspace,
    DecodeWorkspace,
    ExpertWorkspace,
    context_attention,
    context_decode,
    expert_parallel_moe,
    shard,
)

ROOT = Path(__file__).parents[3]
CALLS = 200
HANGS_S = 45  # after which each rank prints where it is, again and again
LONG_S = 1.0  # of a call, in which kernels are built
BEGAN = time.monotonic()


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"[{time.monotonic() - BEGAN:5.1f} s] {what}", flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what took long."""
    began = time.monotonic()
    yield
    if (took := time.monotonic() - began) > LONG_S:
        say(f"{what}: {took:.1f} s")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "what",
    [
        ("examples/context_parallel.py",),
        ("examples/expert_parallel.py",),
        ("-m", "tests.unit.parallel.test_ranks_on_gpu"),
        ("-m", "tests.unit.parallel.pytorch_ring"),
    ],
)
def test_gpus_of_one_host(what: tuple[str, ...], ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"it needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHATS)
def test_a_rank_ends_in_words_when_another_is_killed(what: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"it needs 2 GPUs; torch sees {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "tests.unit.parallel.killed_rank", what]

    def begun(rank: int) -> subprocess.Popen[str]:
        given = [*command, str(rank), str(tmp_path / "ranks"), "5000"]
        return subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    with begun(0) as left, begun(1) as killed:
        try:
            said, _ = left.communicate(timeout=90)
            assert killed.wait(timeout=10) == -signal.SIGKILL
        finally:
            left.kill()
            killed.kill()
    assert left.returncode != 0, said
    assert "failed to receive signal from rank 1" in said or "later than the time limit" in said, said


def attention(rank: int) -> None:
    """Copies give the bits of messages, forward and backward, call after call of other tensors, and in a CUDA graph."""
    draw = torch.Generator("cuda").manual_seed(rank)
    workspace = ContextWorkspace(dist.group.WORLD, 2 * 1030 * 2 * 64 * 2)

    def drawn(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(1, tokens, heads, 64, generator=draw, device="cuda").bfloat16() for heads in (4, 2, 2)]

    for call in range(CALLS):
        tokens = (256, 1024, 640)[call % 3]
        options = {"group": dist.group.WORLD, "causal": True, "window_size": (100, 0) if call % 5 == 0 else (-1, -1)}
        leaves = [one.requires_grad_(call % 4 == 0) for one in drawn(tokens)]
        if call % 7 == rank:
            torch.cuda._sleep(2_000_000)  # a rank is late
        found = []
        with step(f"attention, call {call}, {tokens} tokens, window {options['window_size']}, gradients {call % 4 == 0}"):
            for more in ({}, {"workspace": workspace}):
                out = context_attention(*leaves, **options, **more)
                found.append([out, *(torch.autograd.grad(out, leaves, out.detach()) if out.requires_grad else ())])
            assert all(map(torch.equal, *found)), f"call {call}, {tokens} tokens: other bits"
    say(f"attention: {CALLS} calls have the bits of messages")
    qkv, options = drawn(1024), {"group": dist.group.WORLD, "causal": True}
    context_attention(*qkv, workspace=workspace, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = context_attention(*qkv, workspace=workspace, **options)
    for _ in range(CALLS):
        for held, one in zip(qkv, drawn(1024), strict=True):
            held.copy_(one)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, context_attention(*qkv, **options)), "in a graph"
    print(f"rank {rank}: {workspace}: the bits of messages")


def passed_round(rank: int) -> None:
    """Keys that pass round give what one GPU gives of the whole sequence, within a rounding of each part, and equal bits."""
    draw, group = torch.Generator("cuda").manual_seed(0), dist.group.WORLD
    *whole, gradient = (torch.randn(1, 2048, heads, 64, generator=draw, device="cuda").bfloat16() for heads in (4, 2, 2, 4))
    for causal in (True, False):
        leaves = [one.clone().requires_grad_() for one in whole]
        out = flash_attn_func(*leaves, causal=causal, deterministic=True)
        right = [out, *torch.autograd.grad(out, leaves, gradient)]
        own = [shard(one, 1, group).requires_grad_() for one in whole]
        found = []
        for call in range(CALLS):
            if call % 7 == rank:
                torch.cuda._sleep(2_000_000)  # a rank is late
            with step(f"ring, call {call}"):
                out = context_attention(*own, group=group, causal=causal, exchange="ring")
                found.append([out, *torch.autograd.grad(out, own, shard(gradient, 1, group))])
            assert all(map(torch.equal, found[0], found[-1])), f"ring, call {call}: other bits"
        for name, one, other in zip(("out", "dq", "dk", "dv"), found[0], right, strict=True):
            reference = shard(other.detach(), 1, group).float()
            error = ((one.float() - reference).norm() / reference.norm()).item()
            assert error < 0.01, f"ring, causal {causal}: {name} is off by {error} of its norm"
    say("ring: its results and gradients are those of one GPU")


def decoding(rank: int) -> None:
    """Parts merged in one launch have the bits of NCCL's, on both ranks, and are one GPU's call within a rounding: call after
    call of other lengths, sizes and numbers of queries, and in a CUDA graph whose caches grow."""
    draw, group = torch.Generator("cuda").manual_seed(0), dist.group.WORLD
    ranks, workspace = dist.get_world_size(), DecodeWorkspace(group, 15, 8, 64)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda").bfloat16()

    def step_of(batch: int, queries: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(600 - queries, (batch,), generator=draw, device="cuda", dtype=torch.int32)
        return drawn(batch, queries, 8, 64), drawn(batch, queries, 2, 64), drawn(batch, queries, 2, 64), lengths

    whole = drawn(5, 600, 2, 64), drawn(5, 600, 2, 64)
    own = [one[:, rank::ranks].contiguous() for one in whole]

    def decoded(given: tuple[torch.Tensor, ...], by: DecodeWorkspace | None) -> torch.Tensor:
        (q, k, v, lengths), caches = given, [one[: len(given[0])].clone() for one in own]
        return context_decode(q, *caches, k, v, group=group, cache_seqlens=lengths, workspace=by)

    for call in range(CALLS):
        q, k, v, lengths = given = step_of(1 + call % 5, 1 + call % 3)
        if call % 7 == rank:
            torch.cuda._sleep(2_000_000)  # a rank is late
        with step(f"decoding, call {call}"):
            by_nccl, found = decoded(given, None), decoded(given, workspace)
            right = flash_attn_with_kvcache(
                q, *(one[: len(q)].clone() for one in whole), k, v, causal=True, cache_seqlens=lengths
            )
        every = found.new_empty(ranks * len(found), *found.shape[1:])
        dist.all_gather_into_tensor(every, found)
        assert torch.equal(found, by_nccl), f"decoding, call {call}: other bits than NCCL's"
        assert torch.equal(every, found.repeat(ranks, 1, 1, 1)), f"decoding, call {call}: other bits on another rank"
        error = ((found.float() - right.float()).norm() / right.float().norm()).item()
        assert error < 0.01, f"decoding, call {call}: off by {error} of its norm"
    say(f"decoding: {CALLS} calls have the bits of NCCL")
    for queries in (1, 2):
        held = step_of(5, queries)
        q, k, v, lengths = held
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = context_decode(q, *own, k, v, group=group, cache_seqlens=lengths, workspace=workspace)
        for _ in range(CALLS):
            for kept, one in zip(held, step_of(5, queries), strict=True):
                kept.copy_(one)
            right = decoded(held, None)
            graph.replay()
            assert torch.equal(captured, right), f"decoding {queries} queries, in a graph"


def main() -> None:
    """Both transports give the same bits, forward and backward, call after call of other tokens, and in a CUDA graph."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    faulthandler.dump_traceback_later(HANGS_S, repeat=True)
    dist.init_process_group("nccl", timeout=timedelta(seconds=100))
    say("the ranks have met")
    attention(rank)
    say("attention: so has a CUDA graph")
    passed_round(rank)
    decoding(rank)
    say("decoding: so has a CUDA graph")
    sizes = (dist.group.WORLD, 64, 256, 4, 16)
    by = [ExpertWorkspace(*sizes, transport=transport) for transport in ("collectives", "symmetric")]
    draw = torch.Generator("cuda").manual_seed(rank)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda")

    here = 16 // dist.get_world_size()
    weights = [(drawn(here, 256, width) / 16).bfloat16().requires_grad_() for width in (256, 128)]
    for call in range(CALLS):
        tokens = (rank * 37 + call * 13) % 65
        x, routing = drawn(tokens, 256).bfloat16().requires_grad_(), drawn(tokens, 4).softmax(-1).requires_grad_()
        ids = torch.randint(-1, 17, (tokens, 4), generator=draw, device="cuda", dtype=torch.int32)
        combine = "exact" if call % 2 else "reduced"
        if call % 7 == rank:
            torch.cuda._sleep(2_000_000)  # a rank is late
        found = []
        named = f"experts, call {call}, {tokens} tokens, {combine}, gradients {call % 3 == 0}"
        with step(named), torch.set_grad_enabled(call % 3 == 0):
            for workspace in by:
                out = expert_parallel_moe(x, *weights, routing, ids, workspace=workspace, combine=combine)
                gradients = torch.autograd.grad(out, [x, *weights, routing], torch.ones_like(out)) if out.requires_grad else ()
                found.append([out, *gradients])
            assert all(map(torch.equal, *found)), f"call {call}, {combine}: other bits"
    say(f"experts: {CALLS} calls have the bits of NCCL")
    x, routing = drawn(64, 256).bfloat16(), drawn(64, 4).softmax(-1)
    ids = torch.randint(16, (64, 4), generator=draw, device="cuda", dtype=torch.int32)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        expert_parallel_moe(x, *weights, routing, ids, workspace=by[1])
        with torch.cuda.graph(graph):
            captured = expert_parallel_moe(x, *weights, routing, ids, workspace=by[1])
        for _ in range(CALLS):
            x.copy_(drawn(64, 256))
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, expert_parallel_moe(x, *weights, routing, ids, workspace=by[0])), "in a graph"
    print(f"rank {rank}: {by[1]}: the bits of {by[0]}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
