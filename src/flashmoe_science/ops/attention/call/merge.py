"""What a merge of attention to parts of the keys takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashmoe_science.kernel import Kernel
from flashmoe_science.ops.attention.problem.merge import AttentionMergeProblem


class MergeInputs(NamedTuple):
    """One call of an AttentionMergeProblem.

    outs: [parts, tokens, heads, head_dim]; lses: fp32 [parts, heads, tokens], -inf where a row has none of a part's keys.
    A kernel's plan also takes sequences of parts, and a batch before the tokens and the heads.
    """

    outs: torch.Tensor | Sequence[torch.Tensor]
    lses: torch.Tensor | Sequence[torch.Tensor]


Result = tuple[torch.Tensor, torch.Tensor]  # out, lse
MergeKernel = Kernel[AttentionMergeProblem, MergeInputs, Result]
