"""What only a GPU shows of the public functions: graphs, memory, devices, the kernels named, and the cost of an eager call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flashmoe_science.dispatch.registry import OURS
from flashmoe_science.ops.attention.shapes import problem_of

import flashmoe_science as fm
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe

pytestmark = pytest.mark.gpu

EAGER_CALLS = Path(__file__).with_name("eager_calls.py")
OPERATOR = torch.ops.flashmoe.attention_forward.default


def tensors(
    batch: int = 2, heads: int = 4, queries: int = 128, keys: int = 128, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, queries, width, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, heads, keys, width, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v


def serving(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str]:
    """Names of our kernels that serve these tensors here."""
    problem = problem_of(q, k, v, "full")
    return [kernel.name for kernel in OURS if kernel.supports(problem, current_gpu(q.device)) is None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck(dtype: torch.dtype, return_lse: bool) -> None:
    q, k, v = tensors(queries=65, keys=130, dtype=dtype)
    torch.library.opcheck(OPERATOR, (q, k[:, :2], v[:, :2], "causal", None, return_lse, None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.jit
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_one_graph_and_the_result(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fm.scaled_dot_product_attention, fullgraph=True, dynamic=dynamic)
    for rows in (65, 200):
        inputs = tensors(queries=rows, keys=rows)
        expected = fm.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(compiled(*inputs, is_causal=True), expected, rtol=0, atol=0)


def test_each_kernel_replays_from_a_cuda_graph_bit_by_bit() -> None:
    inputs = tensors(queries=200, keys=333)
    for name in serving(*inputs):
        expected = fm.scaled_dot_product_attention(*inputs, kernel=name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fm.scaled_dot_product_attention(*inputs, kernel=name)
        for _ in range(2):
            out.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_call_allocates_the_output_and_the_log_sum_exp_and_nothing_else() -> None:
    q, k, v = tensors(batch=1, heads=8, queries=4096, keys=4096, width=128)
    token_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]

    def call() -> object:
        return fm.flash_attn_func(*token_first, causal=True, return_attn_probs=True)

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    assert result is not None
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == 8 * 4096 * (128 * 2 + 4)


def test_the_kernel_asked_for_is_the_one_launched() -> None:
    inputs = tensors()
    names = serving(*inputs)
    assert names
    for name in names:
        fm.scaled_dot_product_attention(*inputs, kernel=name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fm.scaled_dot_product_attention(*inputs, kernel=name)
            torch.cuda.synchronize()
        seen = [event.key for event in profile.key_averages() if "flashmoe" in event.key]
        assert seen == [f"flashmoe_{name}"], seen


def test_a_kernel_that_cannot_serve_is_an_error() -> None:
    inputs = tensors(dtype=torch.float32)
    for kernel in OURS:
        if kernel.name not in serving(*inputs):
            with pytest.raises(CannotServe, match=kernel.name):
                fm.scaled_dot_product_attention(*inputs, kernel=kernel.name)
    q, k, v = tensors()
    with pytest.raises(CannotServe, match="requires gradients"):
        fm.scaled_dot_product_attention(q.requires_grad_(), k, v, kernel=OURS[0].name)
    with pytest.raises(ValueError, match="value is on cpu and query on cuda:0"):
        fm.scaled_dot_product_attention(q, k, v.cpu())


def test_misaligned_tensors_are_served_right_and_the_decision_says_by_what() -> None:
    q, k, v = tensors(width=64)
    memory = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)
    shifted = memory[1:].view_as(q).copy_(q)
    assert fm.explain(shifted, k, v).kernel in serving(q, k, v)
    torch.testing.assert_close(
        fm.scaled_dot_product_attention(shifted, k, v), fm.scaled_dot_product_attention(q, k, v), rtol=1.6e-2, atol=1e-2
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    inputs = [tensor.to("cuda:1") for tensor in tensors()]
    assert torch.cuda.current_device() == 0
    expected = F.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(fm.scaled_dot_product_attention(*inputs), expected, rtol=1.6e-2, atol=1e-2)
    assert torch.cuda.current_device() == 0


def test_an_eager_call_at_128_costs_less_than_pytorchs() -> None:
    """In a process of its own: a profiler that any test has attached slows all later launches of its process."""
    done = subprocess.run([sys.executable, EAGER_CALLS], capture_output=True, text=True, check=True)
    ours, theirs = map(float, done.stdout.split())
    assert ours < theirs, f"ours {ours:.1f} us, PyTorch's {theirs:.1f} us"
