"""The epilogue of an expert's first product, on a GPU in fp32."""

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
