"""The public mixture-of-experts functions.

``route`` chooses the experts of each token and their weights; ``fused_moe`` computes them, in the weight layouts that models
hold. Tensors on the CPU, and inputs that require gradients, are served by PyTorch's own operators. ``explain_moe`` says what
serves a call of ``fused_moe``. ``flashmoe_science.nn`` has the layer.
"""

from __future__ import annotations

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.ops.moe.inputs import Activation
from flashmoe_science.ops.moe.route import balance_loss, expert_load, route
from flashmoe_science.ops.moe.spec import check_bias, check_routing, check_weights, checked_activation, inputs_of
from flashmoe_science.ops.moe.torch_op import decide, experts_forward, needs_grad

__all__ = ["balance_loss", "expert_load", "explain_moe", "fused_moe", "route"]


def fused_moe(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_weights: torch.Tensor,
    top_k_ids: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    kernel: str | None = None,
) -> torch.Tensor:
    """The sum over a token's experts of its routing weight times ``down(act(gate x) * up x)``.

    Sums are fp32 and in a fixed order: equal inputs give equal results. Nothing waits for the host, weights are never copied,
    and a call can be captured in a CUDA graph and replayed with another routing.

    Args:
        hidden_states: [..., H], fp16, bf16 or fp32; any leading dimensions, any number of tokens from 0.
        gate_up_proj: [E, 2I, H], the rows of all gates, then of all ups; [E, I, H] for experts without a gate. Any strides.
        down_proj: [E, H, I].
        top_k_weights: [..., K], floating.
        top_k_ids: [..., K], int32 or int64. An id below 0 or at least E is no expert here and adds nothing (experts of other
            ranks); an id that stands twice adds twice.
        activation: "silu", "gelu" (by erf), "gelu_tanh", "relu", "relu2" (its square), or "clamped_silu", gpt-oss's:
            ``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``.
        gate_up_bias, down_bias: [E, 2I] (or [E, I]) and [E, H]; added before the activation and before the routing weight.
        transposed: the weights are [E, H, 2I] and [E, I, H], as gpt-oss holds them.
        interleaved: gates and ups alternate, as in gpt-oss.
        alpha, limit: of "clamped_silu".
        kernel: serve by this kernel or raise; by default the best for the problem.

    Returns:
        [..., H] in the dtype of ``hidden_states``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, or a ``kernel`` that cannot serve the call, in one line.
    """
    x, w1, w2, weights, ids, act = _checked(
        hidden_states, gate_up_proj, down_proj, top_k_weights, top_k_ids, activation, gate_up_bias, down_bias, transposed,
        interleaved, alpha, limit,
    )  # fmt: skip
    if x.shape[0] == 0:
        return torch.zeros_like(hidden_states)
    return experts_forward(x, w1, w2, weights, ids, act, gate_up_bias, down_bias, kernel).view(hidden_states.shape)


def explain_moe(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_weights: torch.Tensor,
    top_k_ids: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    kernel: str | None = None,
) -> Decision:
    """What serves ``fused_moe`` with the same arguments, and why. Compiles the kernel; launches nothing.

    Raises:
        TypeError, ValueError: what the call itself would raise.
    """
    x, w1, w2, weights, ids, act = _checked(
        hidden_states, gate_up_proj, down_proj, top_k_weights, top_k_ids, activation, gate_up_bias, down_bias, transposed,
        interleaved, alpha, limit,
    )  # fmt: skip
    if x.shape[0] == 0:
        raise ValueError("hidden_states has no tokens: nothing is computed")
    inputs = inputs_of(x, w1, w2, weights, ids, act, gate_up_bias, down_bias)
    return decide(inputs, kernel, needs_grad(x, w1, w2, weights, gate_up_bias, down_bias))


def _checked(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_weights: torch.Tensor,
    top_k_ids: torch.Tensor,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Activation]:
    """(x [T, H], w1 [E, 2I or I, H], w2 [E, H, I], weights [T, K], ids [T, K], the activation)."""
    if not isinstance(transposed, bool):
        raise TypeError(f"transposed is {transposed!r}; it must be True or False")
    if transposed:
        for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
                raise ValueError(f"{name} must be a tensor of three dimensions, experts first")
        gate_up_proj, down_proj = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
    check_weights(hidden_states, gate_up_proj, down_proj)
    check_routing(hidden_states, top_k_weights, top_k_ids)
    act = checked_activation(activation, gate_up_proj, down_proj, interleaved, alpha, limit)
    experts, rows, dim = gate_up_proj.shape
    check_bias("gate_up_bias", gate_up_bias, hidden_states, (experts, rows))
    check_bias("down_bias", down_bias, hidden_states, (experts, dim))
    top_k = top_k_ids.shape[-1]
    if top_k > experts:
        raise ValueError(f"top_k_ids has {top_k} experts a token, and there are {experts}; it may have at most as many")
    x = hidden_states.reshape(-1, dim)
    if x.stride(-1) != 1 and x.numel():
        x = x.contiguous()
    return x, gate_up_proj, down_proj, top_k_weights.reshape(-1, top_k), top_k_ids.reshape(-1, top_k), act
