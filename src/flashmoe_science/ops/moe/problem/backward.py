"""The gradients of one mixture-of-experts layer. Text form: ``moebwd t4096 e64 k8 d1024 f2048 bf16``, the forward's words."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.ops.moe import problem as forward
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.problem import DTYPE_BYTES, ProblemError

WORD = "moebwd"
GRAMMAR = forward.GRAMMAR.replace("moe ", f"{WORD} ", 1)


@dataclass(frozen=True, slots=True)
class MoEBackwardProblem(MoEProblem):
    """The gradients of an MoEProblem, whose fields these are, from the gradient into its result.

    - "ids": of x, w1, w2, the routing weights and biases, from the pre-activations that the forward saved.
    - "logits", "zipf": a step of training, the forward too, from router logits to their gradient: what a user waits for.
    """

    op = "moe_backward"

    def _check_format(self, name: str) -> None:
        raise ProblemError(f"weight_format is {name!r}; weights in a format have no gradients")

    def flops(self) -> int:
        """FLOPs of two products a matrix (its gradient and its operand's), and of the forward in a training step."""
        return (2 if self.routing == "ids" else 3) * MoEProblem.flops(self)

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: x, dout, the touched experts' weights and the routing read; dx, the gradients of
        all experts and of the routing written. The pre-activations are read; in a step the output is written instead."""
        of_rows = 3 * self.tokens * self.dim + self.experts * (self.weights() + self.biases())
        touched = self.weights() + self.bias * self.dim
        if self.routing == "ids":
            of_rows += self.pairs() * self.rows_of_w1()
            of_routing = self.pairs()
        else:
            of_rows += self.tokens * self.dim
            touched = self.weights() + self.biases()
            of_routing = self.tokens * self.experts
        elements = of_rows + self.touched() * touched
        return elements * DTYPE_BYTES[self.dtype] + self.routing_bytes() + 4 * of_routing

    def __str__(self) -> str:
        return MoEProblem.__str__(self).replace("moe ", f"{WORD} ", 1)


def parse(text: str) -> MoEBackwardProblem:
    """Read the text form, whose first word is ``moebwd``. Raises ProblemError."""
    return forward.parse_as(MoEBackwardProblem, text, GRAMMAR)
