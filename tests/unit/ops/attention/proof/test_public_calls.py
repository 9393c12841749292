"""The public function of a problem with features gives, on the CPU by PyTorch's operators, what the oracle says."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.attention.held import CPU, expected_of, inputs_of, reasons

from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.front.kernels import FALLBACK
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof.contract import CONTRACT
from flashmoe_science.ops.attention.proof.public_calls import public_call
from flashmoe_science.ops.attention.proof.suites import SUITES

SERVED = (
    "attn b1 h2 q9 d8 fp32 causal",
    "attn b2 h4 hk2 q9 k20 d8 fp32 left4 right3",
    "attn b2 h4 hk2 q9 k20 d8 fp32 causal left4 softcap3",
    "attn b2 h4 q9 k20 d8 fp32 alibi",
    "attn b2 h4 q9 k20 d8 fp32 boolmask",
    "attn b2 h4 q9 k20 d8 fp32 bias",
    "attn b3 h4 hk2 q2 k30 d8 fp32 causal bshd ragged sinks",
    "attn b3 h4 hk2 q2 k32 d8 fp32 causal bshd ragged page8 left9",
    "attn b3 h4 hk2 q2 k30 d8 fp32 causal bshd ragged leftpad softcap3",
    "attn b3 h4 hk2 q9 k32 d8 fp32 causal bshd packed page8",
    "attn b3 h4 hk2 q9 k30 d8 fp32 right5 bshd packed",
    "attn b3 h4 hk2 q2 k30 d8 bf16 ragged fp8kv",
)


@pytest.mark.parametrize("text", SERVED)
def test_the_public_function_computes_the_problem(text: str) -> None:
    inputs = inputs_of(text)
    call = public_call(inputs.problem, FALLBACK)
    assert call is not None
    tensors = CONTRACT.inputs(inputs.problem, CPU, torch.Generator().manual_seed(1))
    assert reasons((call(inputs).out,), expected_of(inputs, tensors)) == []


@pytest.mark.parametrize("text", SERVED)
def test_it_asks_for_the_very_kernel(text: str) -> None:
    inputs = inputs_of(text)
    call = public_call(inputs.problem, "no_such_kernel")
    assert call is not None
    with pytest.raises(ValueError, match="no_such_kernel"):
        call(inputs)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("left4 right3", {"window_size": (4, 3)}),
        ("causal left4 softcap3", {"window_size": (4, -1), "softcap": 3.0}),
        ("sinks alibi", {"sinks", "alibi_slopes"}),
        ("boolmask", {"attn_mask"}),
        ("", set()),
    ],
)
def test_a_candidate_is_called_with_what_its_problem_has(words: str, arguments: dict[str, object] | set[str]) -> None:
    problem = parse(f"attn b2 h4 hk2 q9 k20 d8 fp32 {words}")
    assert CONTRACT.cannot(problem) is None
    given: dict[str, object] = {}

    def candidate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: object) -> torch.Tensor:
        given.update(named)
        return q

    CONTRACT.call(candidate, problem, CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(1)))
    more = {name: value for name, value in given.items() if name not in ("causal", "softmax_scale")}
    assert given["causal"] is problem.causal
    assert set(more) == set(arguments)
    assert isinstance(arguments, set) or more == arguments


@pytest.mark.parametrize("words", ["ragged", "packed", "causal prefix4", "fp8kv", "ragged page16"])
def test_what_a_candidate_has_no_argument_for_is_not_asked_of_it(words: str) -> None:
    reason = CONTRACT.cannot(parse_problem(f"attn b2 h4 hk2 q9 k20 d8 bf16 {words}"))
    assert reason is not None
    assert "does not serve" in reason


def test_only_what_no_public_function_has_arguments_for_has_none() -> None:
    for name in ("decode", "serving"):
        for text in SUITES[name]:
            problem = parse(text)
            bottom_right = problem.causal and problem.features.lengths == "equal" and problem.seqlen_q != problem.seqlen_k
            without = {"prefix"} | ({"sinks"} if problem.features.lengths == "equal" else set())
            expected = not (without & set(problem.features.kinds())) and not bottom_right
            assert (public_call(problem, "split_triton") is not None) == expected, text
