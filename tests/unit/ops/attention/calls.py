"""One call of an attention problem from its tensors, for the tests of this folder and the scripts that they start."""

from __future__ import annotations

import torch

from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.problem import AttentionProblem


def call_of(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    num_splits: int = 0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **tensors: torch.Tensor | None,
) -> AttentionInputs:
    """``tensors`` by their names in Tensors; the window is the problem's."""
    window = problem.features.window_left, problem.features.window_right
    options = Options(problem.mask, return_lse, None, *window, softcap, num_splits, max_seqlen_q, max_seqlen_k)
    return AttentionInputs(problem, Tensors(q, k, v, **tensors), options, scale, out)  # type: ignore[arg-type]
