"""One attention backward. Text form: ``attnbwd b2 h16 hk4 q4096 d128 bf16 causal``, the words of the forward's."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.ops.attention import problem as forward
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import PLAIN, unsupported
from flashmoe_science.problem import DTYPE_BYTES, ProblemError

WORD = "attnbwd"
GRAMMAR = forward.GRAMMAR.replace("attn ", f"{WORD} ", 1)
# Of KINDS, what has a backward: a cache has none.
DIFFERENTIABLE = ("window", "softcap", "sinks", "alibi", "boolmask", "bias", "prefix", "packed")


@dataclass(frozen=True, slots=True)
class AttentionBackwardProblem(AttentionProblem):
    """The gradients of Q, K and V of an AttentionProblem, whose fields these are, from its results and the gradient into O.
    Raises ProblemError as there; keys in a cache."""

    op = "attention_backward"

    def __post_init__(self) -> None:
        AttentionProblem.__post_init__(self)
        if self.features != PLAIN and (reason := unsupported(self.features, DIFFERENTIABLE, "a backward")) is not None:
            raise ProblemError(reason)

    def flops(self) -> int:
        """FLOPs of five products: scores, dP and dV, dQ, dK."""
        return 2 * self.scores() * (3 * self.head_dim + 2 * self.head_dim_v)

    def min_bytes(self) -> int:
        """Bytes that must cross device memory: Q, K, V, O, dO and the log-sum-exp read once, dQ, dK and dV written once."""
        rows, width = self.queries() * self.heads, DTYPE_BYTES[self.dtype]
        of_qkv = rows * self.head_dim * width + self.keys() * self.heads_kv * (self.head_dim + self.head_dim_v) * width
        return self.input_bytes() + of_qkv + rows * (2 * self.head_dim_v * width + 4)

    def keys(self) -> int:
        """Rows of keys, each counted once and not per head."""
        return sum(one.keys for one in self.sequence_lengths())

    def __str__(self) -> str:
        return AttentionProblem.__str__(self).replace("attn ", f"{WORD} ", 1)


def parse(text: str) -> AttentionBackwardProblem:
    """Read the text form, whose first word is ``attnbwd``. Raises ProblemError."""
    return forward.parse_as(AttentionBackwardProblem, text, GRAMMAR)
