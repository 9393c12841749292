"""Two trainings of 200 steps with ``deterministic=True``, dense and with experts: equal weights, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from tests.unit.interpreter import Interpreter
from torch import nn

import flashmoe_science as fms
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume

WORDS, STEPS = 29, 200


class Model(nn.Module):
    """Predicts the next of tokens by a layer of attention, with a window, grouped heads and a soft cap, and one of experts, if
    it has some, whose router's losses it gives too."""

    def __init__(self, heads: int, width: int, experts: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.tokens = nn.Embedding(WORDS, heads * width)
        self.qkv = nn.Linear(heads * width, 2 * heads * width)
        self.experts = fms.FlashMoELayer(heads * width, 2 * width, experts, 2) if experts else None
        self.out = nn.Linear(heads * width, WORDS)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        x = self.tokens(tokens)
        rows = self.qkv(x).unflatten(-1, (2 * self.heads, self.width))
        q, k, v = rows.split((self.heads, self.heads // 2, self.heads // 2), 2)
        attended = fms.flash_attn_func(q, k, v, causal=True, window_size=(7, 0), softcap=5.0, deterministic=True)
        assert isinstance(attended, torch.Tensor)
        x = x + attended.flatten(2)
        if self.experts is None:
            return self.out(x), 0.0
        chosen, losses = self.experts(x, return_losses=True)
        return self.out(x + chosen), 0.01 * losses.balance + 0.001 * losses.z


def trained(
    device: str, dtype: torch.dtype, heads: int, width: int, tokens: int, rate: float, experts: int
) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of each step, and the weights after the last."""
    torch.manual_seed(3)
    model = Model(heads, width, experts).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    start, losses = torch.randint(WORDS, (2, 1)), []
    sequence = (start + torch.arange(tokens + 1) ** 2) % WORDS
    for step in range(STEPS):
        given = (sequence + step % WORDS).remainder(WORDS).to(device)
        logits, of_router = model(given[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + of_router).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [one.detach().clone() for one in model.parameters()]


def twice(
    device: str, dtype: torch.dtype, heads: int, width: int, tokens: int, rate: float = 1e-2, experts: int = 0
) -> dict[str, object]:
    torch.use_deterministic_algorithms(bool(experts))
    try:
        (losses, weights), (again, same) = (trained(device, dtype, heads, width, tokens, rate, experts) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    return {"first": losses[0], "last": losses[-1], "bits": losses == again and all(map(torch.equal, weights, same))}


def assert_equal(found: dict[str, object]) -> None:
    assert found["bits"]
    assert found["last"] < 0.5 * found["first"]  # type: ignore[operator]


@pytest.mark.parametrize("experts", [0, 8])
def test_by_pytorchs_operators(experts: int) -> None:
    assert_equal(twice("cpu", torch.float32, 4, 8, 12, experts=experts))


@pytest.mark.slow
@pytest.mark.redundant
def test_by_our_kernels(interpreted: Interpreter) -> None:
    assert_equal(interpreted("test_training_repeats.py"))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "experts"), [(64, 0), (128, 0), (128, 32), (256, 32)])
def test_by_our_kernels_on_a_gpu(width: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of PyTorch's own products
    # At higher rates PyTorch's operators are no better: of (256, 32), which begins at 3.5, those in fp32 end at 0.9 with 5e-4.
    # At these an H200 ends at 0.056 (PyTorch's in bf16 at 0.056, in fp32 at 0.093), and (128, 32) at 0.23, at 1e-3 at 0.49.
    rate = {(128, 32): 5e-4, (256, 32): 1e-4}.get((width, experts), 1e-3)
    assert_equal(twice("cuda", torch.bfloat16, 8, width, 700, rate, experts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with assume(gpu_named("a100")):
        print(json.dumps(twice("cpu", torch.float32, 2, 16, 12)))
