"""Calls the same function on the same inputs for some seconds, and prints how many results differed, or that one never came.

Run as ``python -m tests.unit.shared_gpu WHAT SECONDS``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from tests.unit.ops.moe.cases import Case, inputs_of

import flashmoe_science as fms
from flashmoe_science.ops.moe.call.formats import OF_FORMAT

FORMATS = ("mxfp4", "fp8_block_w8a8", "fp8_channel_w8a8", "fp8_channel_static")
WHATS = (*FORMATS, "experts", "forward", "backward")
TOGETHER, HUNG_S = 50, 15.0  # calls between two looks, which a stream has room for, and their limit


def call_of(what: str) -> Callable[[], torch.Tensor]:
    if what in ("forward", "backward"):
        q, k, v = (torch.randn(2, 2048, 16, 128, device="cuda").bfloat16().requires_grad_(what == "backward") for _ in range(3))
        out = fms.flash_attn_func(q, k, v, causal=True)
        assert isinstance(out, torch.Tensor)
        if what == "forward":
            return lambda: fms.flash_attn_func(q, k, v, causal=True)  # type: ignore[return-value]
        return lambda: torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)[0]
    one = inputs_of(Case("moe t3000 e16 k4 d1024 f768 bf16" + (f" w:{what}" if what in FORMATS else "")), "cuda")
    x, w1, w2, weights, ids, _, _, *of_format = one.tensors
    form, options = one.problem.weight_format, dict(zip(OF_FORMAT, of_format, strict=True))
    return lambda: fms.fused_moe(x, w1, w2, weights, ids, weight_format=form, **options)


def main(what: str, seconds: float) -> None:
    torch.manual_seed(0)
    call = call_of(what)
    first, differ, calls = call().clone(), torch.zeros((), dtype=torch.int64, device="cuda"), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(TOGETHER):
            differ += (call() != first).any()
        begun, done = time.monotonic(), torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() - begun > HUNG_S:
                print(f"a call of {calls} to {calls + TOGETHER} did not end", flush=True)
                os._exit(0)  # what runs on the GPU holds any other way out
            time.sleep(0.002)
        calls += TOGETHER
    print(f"{differ.item()} results differed")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
