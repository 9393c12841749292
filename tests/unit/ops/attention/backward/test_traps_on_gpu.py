"""What backwards of others got wrong, put to each kernel of ours on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.attention.backward import traps
from tests.unit.ops.attention.front import trained

import flashmoe_science as fm
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.attention.front.backward.kernels import ours


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
