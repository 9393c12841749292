"""A router and experts trained by our kernels, for Triton's interpreter: prints by case what is wrong, as JSON.

The second call of each goes around PyTorch's dispatcher: the operators and a new choice are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from tests.unit.ops.moe.front.test_autograd import nothing_anew

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume

T, E, K, H, F = 9, 4, 2, 16, 24
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tokens": ((T,), {}),
    "batches": ((3, T // 3), {}),
    "recomputed": ((T,), {"recompute": True}),
    "added": ((T,), {"weight_grads": True}),
}


def gradients(shape: Sequence[int], kernel: str, weight_grads: bool = False, **how: Any) -> list[torch.Tensor]:
    """Of the states, both weights and the router's logits."""
    torch.manual_seed(0)
    x, logits = (torch.randn(*shape, width).requires_grad_() for width in (H, E))
    w1, w2 = ((torch.randn(E, *sizes) * sizes[1] ** -0.5).requires_grad_() for sizes in ((2 * F, H), (H, F)))
    sums = tuple(map(torch.zeros_like, (w1.detach(), w2.detach()))) if weight_grads else None
    weights, ids = fm.route(logits, K, normalize="sum")
    fm.fused_moe(x, w1, w2, weights, ids, kernel=kernel, weight_grads=sums, **how).square().sum().backward()  # type: ignore[arg-type]
    return [one for one in (x.grad, *(sums or (w1.grad, w2.grad)), logits.grad) if one is not None]


def wrong(shape: tuple[int, ...], how: dict[str, Any]) -> list[str]:
    right = gradients(shape, "grouped_mm")
    with assume(gpu_named("h200")):
        first = gradients(shape, "moe_bwd_triton", **how)
        with nothing_anew():
            second = gradients(shape, "moe_bwd_triton", **how)
    errors = [(one - other).abs().max().item() for one, other in zip(first, right, strict=True)]
    found = [f"gradients are off by {max(errors):.1e}"] if not max(errors) < 2e-5 else []
    return found + ([] if all(map(torch.equal, first, second)) else ["the second call has other bits"])


if __name__ == "__main__":
    print(json.dumps({name: wrong(*case) for name, case in CASES.items()}))
