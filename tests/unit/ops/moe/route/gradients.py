"""The router's gradient by its kernel, for Triton's interpreter: prints by case what is wrong with it, as JSON.

Results are poisoned, and logits are also slices of larger tensors.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.ops.moe.route import backward, losses_triton
from flashmoe_science.ops.moe.route.losses import balance_loss, expert_load, z_loss
from flashmoe_science.ops.moe.route.route import route, route_with_losses
from flashmoe_science.ops.moe.route.spec import Options

DEEPSEEK = {"scoring": "sigmoid", "normalize": "sum", "scaling_factor": 2.5}
# tokens, experts, top_k, and what differs from the softmax over all experts
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "olmoe": (7, 64, 8, {}),
    "olmoe, scaled": (5, 6, 2, {"scaling_factor": 1.5}),
    "mixtral": (3, 8, 2, {"normalize": "sum"}),
    "qwen3": (9, 128, 8, {"normalize": "sum"}),
    "gpt-oss": (4, 32, 4, {"scoring": "softmax_topk"}),
    "gpt-oss, all": (4, 5, 5, {"scoring": "softmax_topk"}),
    "sigmoid": (33, 12, 3, {"scoring": "sigmoid"}),
    "deepseek-v3": (3, 256, 8, {**DEEPSEEK, "groups": 8, "top_k_groups": 4}),
    "one expert": (2, 1, 1, {"normalize": "sum"}),
}
UNIT = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def wrong(
    tokens: int, experts: int, top_k: int, how: dict[str, Any], dtype: torch.dtype, sliced: bool, device: str = "cpu"
) -> list[str]:
    torch.manual_seed(0)
    logits = (3 * torch.randn(tokens, 2 * experts)).to(device, dtype)[:, : experts if sliced else None]
    logits = logits if sliced else logits[:, :experts].contiguous()
    logits[0, 0] = -torch.inf if experts > top_k else 0.0
    dweights = torch.randn(tokens, top_k).to(device)
    leaf = logits.detach().requires_grad_()
    weights, ids = route(leaf, top_k, **how)
    (got,) = torch.autograd.grad(weights, leaf, dweights)
    plain, right = (
        backward._by_pytorch(Options(top_k, **how), one, ids, dweights.to(one)) for one in (logits.float(), logits.double())
    )
    found = wrong_by(got, right, plain, UNIT[dtype] * right.abs().max().clamp(min=1.0), "gradient")
    found += wrong_losses(leaf, dweights, Options(top_k, **how))
    unchosen = torch.ones_like(right, dtype=torch.bool).scatter(1, ids.long(), False)
    dense = how.get("scoring", "softmax") == "softmax" and "normalize" not in how
    return found + ([] if dense or not got[unchosen].any() else ["an expert that was not chosen has a gradient"])


def wrong_by(got: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, rounding: torch.Tensor, name: str) -> list[str]:
    """What is wrong with a gradient, in which terms cancel: it may be off by twice as much as PyTorch's in fp32, and by a
    rounding, as Triton's interpreter truncates bf16."""
    error, of_plain = [(one.double() - right).abs().max() for one in (got, plain)]
    return [] if error <= 2 * of_plain + rounding else [f"{name} off by {error:.2e}, PyTorch's by {of_plain:.2e}"]


def wrong_losses(leaf: torch.Tensor, dweights: torch.Tensor, options: Options) -> list[str]:
    """What is wrong with the losses of logits, and with the gradient of all that a router gives."""
    wide, into = leaf.detach().double(), [torch.tensor(one, device=leaf.device) for one in (-0.7, 0.3)]
    weights, ids, *losses = route_with_losses(leaf, None, *options)
    (got,) = torch.autograd.grad((weights, *losses), leaf, (dweights, *into))
    load = expert_load(ids, leaf.shape[-1])
    pairs = {
        "balance loss": (losses[0], balance_loss(wide, ids)),
        "z-loss": (losses[1], z_loss(wide)),
        "load": (losses_triton.bind(leaf.detach(), ids)(leaf.detach(), ids).load, load),
    }
    found = [name for name, (one, right) in pairs.items() if not (one - right).abs().max() <= 2.0**-21 * right.abs().max()]
    of_all = [backward._by_pytorch(options, one, ids, dweights, *into, load) for one in (leaf.detach(), wide)]
    plain, right = of_all
    return found + wrong_by(got, right, plain, UNIT[leaf.dtype] * right.abs().max(), "gradient with losses")


def main() -> None:
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    found = {}
    losses_triton._PROGRAMS, losses_triton._ELEMENTS, losses_triton._ELEMENTS_OF_ALL = 3, 32, 32  # loops go round
    with assume(gpu_named("h200")):
        for name, case in CASES.items():
            for dtype in UNIT:
                for sliced in (False, True):
                    found[f"{name}, {dtype}{', sliced' if sliced else ''}"] = wrong(*case, dtype, sliced)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
