"""An operation of one's own, added up in the 16 bits of its input where its contract says fp64."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashmoe_science.contract import Contract, contract
from flashmoe_science.problem import CustomProblem


class RowSum(Contract):
    name = "row_sum"

    def default_problems(self) -> Sequence[CustomProblem]:
        return [self.problem("fp16", rows=64, cols=4000)]

    def inputs(self, problem: Any, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shape = (problem["rows"], problem["cols"])
        return {"x": torch.rand(shape, device=device, generator=generator).to(self.dtype(problem))}

    def reference(self, problem: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"].sum(-1)

    def flops(self, problem: Any) -> int:
        return problem["rows"] * problem["cols"]

    def min_bytes(self, problem: Any) -> int:
        return problem["rows"] * (problem["cols"] + 1) * self.dtype(problem).itemsize


@contract(RowSum())
def row_sum_in_halves(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in x.T:
        total += column
    return total
