"""PyTorch's attention on a GPU while our implementation of its flash backend is active: the names of the kernels that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.integrations.test_torch_sdpa import drawn
from torch.nn.attention.varlen import varlen_attn

from flashmoe_science.integrations import torch_sdpa


def kernels(function: Callable[[], Any]) -> str:
    """The names of the kernels that a second call of ``function`` runs."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return " ".join(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)


THEIRS = ("cudnn", "pytorch_flash", "fmha")


def is_ours(names: str) -> bool:
    return bool(names) and not any(name in names for name in THEIRS)


@pytest.fixture
def on_gpu() -> list[torch.Tensor]:
    return [one.cuda().bfloat16() for one in drawn(2, 8, 1024, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_the_kernel_that_runs_is_ours_while_active(causal: bool, on_gpu: list[torch.Tensor]) -> None:
    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(*on_gpu, is_causal=causal)

    expected, before = call(), kernels(call)
    assert not is_ours(before), before
    with torch_sdpa.activated():
        during = kernels(call)
        assert is_ours(during), during
        torch.testing.assert_close(call(), expected, rtol=0.02, atol=0.02)
        compiled = torch.compile(call, fullgraph=True)
        assert is_ours(kernels(compiled))
        masked = kernels(lambda: F.scaled_dot_product_attention(*on_gpu, attn_mask=on_gpu[0].new_zeros(1024, 1024)))
        assert not is_ours(masked), masked
    assert kernels(call) == before


@pytest.fixture
def equal_bits() -> Iterator[None]:
    """Asked of PyTorch, so that a backward of ours serves whatever records say."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("equal_bits")
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_the_backward_that_runs_is_ours_while_active(causal: bool, on_gpu: list[torch.Tensor]) -> None:
    leaves = [one.requires_grad_() for one in on_gpu]

    def loss() -> torch.Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=causal).square().sum()

    def gradients(function: Callable[[], torch.Tensor] = loss) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(), leaves)

    expected = gradients()
    with torch_sdpa.activated():
        names = kernels(gradients)
        assert is_ours(names), names
        got = gradients()
        assert all(map(torch.equal, got, gradients()))
        compiled = torch.compile(loss, fullgraph=True)
        assert is_ours(kernels(lambda: gradients(compiled)))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    dropped = drawn(2, 8, 64, 128)[0].cuda().bfloat16().requires_grad_()
    with torch_sdpa.activated():
        names = kernels(lambda: F.scaled_dot_product_attention(dropped, dropped, dropped, dropout_p=0.5).sum().backward())
    assert not is_ours(names), names


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("equal_bits")
def test_on_a_gpu_varlen_attn_is_ours_while_active() -> None:
    q, k, v = (one.cuda().bfloat16().requires_grad_() for one in drawn(1000, 8, 128))
    starts = torch.tensor([0, 300, 1000], dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        out = varlen_attn(q, k, v, starts, starts, 700, 700, window_size=(-1, 0))
        assert isinstance(out, torch.Tensor)
        return out

    expected = call()
    with torch_sdpa.activated():
        during = kernels(call)
        assert is_ours(during), during
        torch.testing.assert_close(call(), expected, rtol=0.02, atol=0.02)
        assert is_ours(kernels(lambda: torch.autograd.grad(call().sum(), (q, k, v))))
        got = torch.autograd.grad(call().square().sum(), (q, k, v))
    for ours, theirs in zip(got, torch.autograd.grad(call().square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
