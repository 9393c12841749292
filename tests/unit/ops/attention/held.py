"""A kernel's result held to the attention contract, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.measure.tolerance import Expected, check_output, expected
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT

CPU = torch.device("cpu")


def inputs_of(text: str, seed: int = 1) -> AttentionInputs:
    """Standard normal inputs of a problem, the log-sum-exp asked for."""
    problem = parse(text)
    return CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(seed)))


def expected_of(inputs: AttentionInputs, given: dict[str, torch.Tensor] | None = None) -> tuple[Expected, ...]:
    """What the output and the log-sum-exp are held against. ``given`` are the contract's inputs where there are features."""
    problem, tensors = inputs.problem, given or {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    references = CONTRACT.reference(problem, wide)
    return expected(references, CONTRACT.plain(problem, tensors), *CONTRACT.bounds(problem, tensors, references))


def reasons(got: Sequence[torch.Tensor | None], held: Sequence[Expected]) -> list[str]:
    """Why results (None: not given) are refused; empty where they are right."""
    found: list[str] = []
    for name, one, want in zip(("out", "lse"), got, held, strict=False):
        if one is not None:
            found += check_output(name, one, want)[1]
    return found
