"""A fault of an operation of one's own."""

from collections.abc import Mapping, Sequence

import torch

from flashmoe_science.contract import Contract, contract
from flashmoe_science.problem import CustomProblem


class Softmax(Contract):
    name = "softmax"

    def default_problems(self) -> Sequence[CustomProblem]:
        return [self.problem("fp32", rows=9, cols=70)]

    def inputs(self, problem: CustomProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(problem["rows"], problem["cols"], device=device, generator=generator)}

    def reference(self, problem: CustomProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.softmax(inputs["x"], dim=-1)

    def flops(self, problem: CustomProblem) -> int:
        return 4 * problem["rows"] * problem["cols"]

    def min_bytes(self, problem: CustomProblem) -> int:
        return 8 * problem["rows"] * problem["cols"]


@contract(Softmax())
def no_maximum_of_the_inputs(x: torch.Tensor) -> torch.Tensor:
    """Does not take the maximum off first: right for inputs of eight times a normal size, whose exponentials are finite."""
    powers = torch.exp(x)
    return powers / powers.sum(-1, keepdim=True)
