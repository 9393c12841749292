"""The largest errors of split_triton's tanh, of 1 and of itself, by fp64's (run with TRITON_INTERPRET=1): one JSON object."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.attention.forward.splitkv.tile import _tanh


@triton.jit
def apply(x, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, _tanh(tl.load(x + at)))


def main() -> None:
    x = torch.cat((torch.linspace(-30, 30, 2**15), torch.linspace(-1, 1, 2**15)))
    out = torch.empty_like(x)
    apply[(1,)](x, out, 2**16)
    right = x.double().tanh()
    error = (out.double() - right).abs()
    small = (x.abs() < 0.6) & (x != 0)
    print(json.dumps({"of_1": error.max().item(), "of_itself": (error[small] / right[small].abs()).max().item()}))


if __name__ == "__main__":
    main()
