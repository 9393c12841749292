"""Rows whose every key has the lowest finite bias, by which models hide keys: the mean of the values, as of equal scores.

Run as a script with TRITON_INTERPRET=1 (which needs a process of its own) it prints as JSON how far off split_triton is.
"""

from __future__ import annotations

import json

import torch
from tests.unit.ops.attention.calls import call_of

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.operations import kernel_named, parse_problem
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.problem import parse

PROBLEM = "attn b1 h2 q70 k150 d64 bf16 bias"
ROW, HIDDEN = 7, 8  # one such row, and one whose bias is -inf


def error(kernel: AttentionKernel, config: Config, device: torch.device) -> tuple[float, float]:
    """By how much a row of the lowest bias differs from the mean of the values, and one of -inf from 0."""
    problem = parse(PROBLEM)
    generator = torch.Generator(device).manual_seed(3)
    shapes = [(1, 2, length, 64) for length in (70, 150, 150)]
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(torch.bfloat16) for shape in shapes)
    bias = torch.zeros(1, 2, 70, 150, dtype=torch.bfloat16, device=device)
    bias[:, :, ROW], bias[:, :, HIDDEN] = torch.finfo(torch.bfloat16).min, -torch.inf
    out = kernel.run(call_of(problem, q, k, v, 0.125, bias=bias), config).out.float()
    off = out[:, :, ROW] - v.float().mean(2)
    return off.abs().max().item(), out[:, :, HIDDEN].abs().max().item()


def main() -> None:
    torch.set_num_threads(1)
    kernel = kernel_named("split_triton")
    print(json.dumps(error(kernel, kernel.configs(parse_problem(PROBLEM), gpu_named("h200"))[0], torch.device("cpu"))))


if __name__ == "__main__":
    main()
