"""The epilogue of an expert's first product, on a GPU in fp32, and its derivative."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(gate, up, FUNCTION: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """``call.Activation`` of fp32 blocks of one shape, which is the result's; without GATED ``up`` is not read."""
    if FUNCTION == "silu":
        active = gate * tl.sigmoid(gate)
    elif FUNCTION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(y)) / 2 is sigmoid(2 y)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif FUNCTION == "relu":
        active = tl.where(gate < 0.0, 0.0, gate)
    elif FUNCTION == "relu2":
        active = tl.where(gate < 0.0, 0.0, gate) * gate
    else:
        tl.static_assert(FUNCTION == "clamped_silu")
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        active = gate * tl.sigmoid(ALPHA * gate)
        if GATED:
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    if GATED:
        active = active * up
    return active


@triton.jit
def activated_backward(
    gate, up, gradient, FUNCTION: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SIGMOID: tl.constexpr = tl.sigmoid,
):  # fmt: skip
    """``activated``, and by its ``gradient`` those of the gate and of ``up``; without GATED the last is none and is not to be
    read. Where the clamp saturates the gradient is 0; at the limit it is not."""
    if FUNCTION == "silu":
        share = SIGMOID(gate)
        active, slope = gate * share, share + gate * share * (1.0 - share)
    elif FUNCTION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        active, slope = gate * share, share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif FUNCTION == "gelu_tanh":
        share = SIGMOID(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        active, slope = gate * share, share + gate * share * (1.0 - share) * inner
    elif FUNCTION == "relu":
        active, slope = tl.where(gate < 0.0, 0.0, gate), tl.where(gate > 0.0, 1.0, 0.0)
    elif FUNCTION == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        active, slope = positive * gate, 2.0 * positive
    else:
        tl.static_assert(FUNCTION == "clamped_silu")
        saturated = gate > LIMIT
        gate = tl.where(saturated, LIMIT, gate)
        share = SIGMOID(ALPHA * gate)
        active, slope = gate * share, tl.where(saturated, 0.0, share + ALPHA * gate * share * (1.0 - share))
    of_up = gradient * active
    if GATED:
        if FUNCTION == "clamped_silu":
            of_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, of_up)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        active = active * up
        gradient = gradient * up
    return active, gradient * slope, of_up
