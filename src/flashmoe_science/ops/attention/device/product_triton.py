"""Products of tiles in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """a b, added to ``acc`` unless that is None: fp32."""
    if INTERPRET:  # the interpreter's bf16 dot is wrong (Triton 3.6 to 3.9), its fp32 dot is right
        made = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return made if acc is None else acc + made
    elif acc is None:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
