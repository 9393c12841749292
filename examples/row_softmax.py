"""An operation of one's own: the contract that says what is right and what it costs, and a candidate held to it.

flashmoe prove examples/row_softmax.py:row_softmax
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from flashmoe_science.contract import Contract, contract
from flashmoe_science.problem import CustomProblem


class RowSoftmax(Contract):
    """softmax(x) along the rows of x [rows, cols]."""

    name = "row_softmax"

    def default_problems(self) -> Sequence[CustomProblem]:
        return [self.problem("fp32", rows=1024, cols=500), self.problem("fp16", rows=4096, cols=1024)]

    def inputs(self, problem: CustomProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shape = (problem["rows"], problem["cols"])
        return {"x": torch.randn(shape, device=device, generator=generator).to(self.dtype(problem))}

    def reference(self, problem: CustomProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.softmax(inputs["x"], dim=-1)

    def flops(self, problem: CustomProblem) -> int:
        return 4 * problem["rows"] * problem["cols"]  # subtract the maximum, exponentiate, add up, divide

    def min_bytes(self, problem: CustomProblem) -> int:
        return 2 * problem["rows"] * problem["cols"] * self.dtype(problem).itemsize


@triton.jit
def row_softmax_kernel(x_base, out_base, stride_x, stride_out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_base + row * stride_x + at, mask=at < cols, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_base + row * stride_out + at, (e / tl.sum(e, 0)).to(out_base.dtype.element_ty), mask=at < cols)


@contract(RowSoftmax())
def row_softmax(x: torch.Tensor) -> torch.Tensor:
    """A block a row on a GPU; on a CPU, where Triton has no kernels, the same steps in PyTorch."""
    if not x.is_cuda:
        e = torch.exp(x.float() - x.amax(-1, keepdim=True).float())
        return (e / e.sum(-1, keepdim=True)).to(x.dtype)
    out = torch.empty_like(x)
    rows, cols = x.shape
    row_softmax_kernel[(rows,)](x, out, x.stride(0), out.stride(0), cols, BLOCK=triton.next_power_of_2(cols), num_warps=4)
    return out


row_softmax.promises = {"kernel": "row_softmax_kernel", "threads": 128, "deterministic": True}  # type: ignore[attr-defined]
