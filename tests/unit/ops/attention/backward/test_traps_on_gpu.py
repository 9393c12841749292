"""What backwards of others got wrong, put to each kernel of ours on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.attention.backward import traps
from tests.unit.ops.attention.front import trained

import flashmoe_science as fm
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.attention.call.backward import BackwardKernel
from flashmoe_science.ops.attention.front.backward.kernels import ours
from flashmoe_science.ops.attention.problem.backward import parse


@pytest.mark.gpu
@pytest.mark.parametrize("trap", traps.TRAPS, ids=traps.NAMES)
def test_what_others_got_wrong_is_right(trap: traps.Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = current_gpu()
    assert gpu is not None
    monkeypatch.setattr(traps, "GPU", gpu)
    monkeypatch.setattr(traps, "DEVICE", torch.device("cuda"))
    found, served = {}, set()
    for case, inputs in trap():
        for kernel in ours():
            if kernel.cannot(inputs.problem, gpu) is None:
                served.add(kernel.name)
                found[f"{kernel.name}: {case}"] = traps.complaints(inputs, traps.run(inputs, kernel))
    assert "bwd_triton" in served
    assert {case: reasons for case, reasons in found.items() if reasons} == {}


@pytest.mark.gpu
def test_alike_calls_have_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "DEVICE", torch.device("cuda"))
    assert {name: error for name, error in trained.again()["errors"].items() if error > 1e-4} == {}


@pytest.mark.gpu
def test_a_step_of_packed_sequences_does_not_wait_for_the_gpu() -> None:
    """Their longest length is a tensor on it."""
    rows = torch.randn(3, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    inputs = [one.clone().requires_grad_() for one in rows]
    starts = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device="cuda")
    longest = starts.diff().max()

    def gradients(most: object) -> tuple[torch.Tensor, ...]:
        out = fm.flash_attn_varlen_func(*inputs, starts, starts, most, most, causal=True, deterministic=True)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, inputs, rows[0])

    expected = gradients(200)
    gradients(longest)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = gradients(longest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, right in zip(got, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ours(), ids=lambda one: one.name)
def test_a_whole_step_replays_from_a_graph_with_other_lengths(kernel: BackwardKernel) -> None:
    """Forward, backward and the change of what was trained."""
    if (reason := kernel.cannot(parse("attnbwd b3 h4 q300 d64 bf16 causal bshd packed"), current_gpu())) is not None:
        pytest.skip(reason)
    starts = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device="cuda")
    static = [one.clone().requires_grad_() for one in torch.randn(3, 300, 4, 64, device="cuda", dtype=torch.bfloat16).unbind()]

    def step(inputs: list[torch.Tensor]) -> None:
        out = fm.flash_attn_varlen_func(*inputs, starts, starts, 300, 300, causal=True, kernel=kernel.name)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        made = torch.autograd.grad(out.float().square().sum(), inputs)
        with torch.no_grad():
            for one, gradient in zip(inputs, made, strict=True):
                one.sub_(gradient, alpha=0.1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    side.synchronize()
    eager, graph = [one.detach().clone().requires_grad_() for one in static], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static)
    for lengths in ((0, 100, 100, 300), (0, 7, 250, 300), (0, 0, 299, 300)):
        starts.copy_(torch.tensor(lengths))
        graph.replay()
        step(eager)
        for got, right in zip(static, eager, strict=True):
            assert torch.equal(got, right)
