"""What a candidate is held to, and how a wrong statement of it is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from flashmoe_science.contract import Contract, built_in, contract, contract_of, is_built_in
from flashmoe_science.operations import OPERATIONS, parse_problem
from flashmoe_science.problem import CustomProblem


class Doubled(Contract):
    name = "doubled"

    def reference(self, problem: CustomProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return 2 * inputs["x"]

    def flops(self, problem: CustomProblem) -> int:
        return problem["rows"]

    def min_bytes(self, problem: CustomProblem) -> int:
        return 2 * problem["rows"] * self.dtype(problem).itemsize


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q


@pytest.mark.parametrize("name", [one.name for one in OPERATIONS])
def test_a_built_in_contract_is_named_by_a_string(name: str) -> None:
    @contract(name)
    def fn() -> None: ...

    assert contract_of(fn).name == name
    assert is_built_in(contract_of(fn))


def test_a_problem_of_ones_own_has_its_cost_filled_in() -> None:
    problem = Doubled().problem("fp16", rows=100)
    assert str(problem) == "op doubled rows100 fp16 flops100 bytes400"
    assert parse_problem(str(problem)) == problem


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "attentoin",
            "it must be an instance of Contract or one of attention, attention_backward, attention_merge, moe",
        ),
        (Doubled, "it must be an instance of Contract"),
        (Contract(), "contract Contract has no name"),
    ],
)
def test_a_wrong_contract_is_refused_in_one_line(said: object, message: str) -> None:
    def fn() -> None: ...

    fn.contract = said  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        contract_of(fn)


def test_distributions_change_floating_tensors_only() -> None:
    inputs = {"x": torch.ones(3), "ids": torch.arange(3)}
    for name in Doubled.distributions:
        varied = Doubled().vary(name, {key: one.clone() for key, one in inputs.items()})
        assert torch.equal(varied["ids"], inputs["ids"])
        assert torch.equal(varied["x"], inputs["x"]) == (name == "normal")


def test_attention_says_why_it_cannot_be_asked() -> None:
    held = built_in("attention")
    assert held.cannot(parse_problem("attn b1 h1 q8 d8 fp32 causal")) is None
    assert "no top-left causal mask" in str(held.cannot(parse_problem("attn b1 h1 q8 k9 d8 fp32 causal-topleft")))
    assert "contract of attention, not of moe" in str(held.cannot(parse_problem("moe t4 e2 k1 d8 f8")))


def test_attention_called_with_another_scale_or_none_is_held_to_what_that_means() -> None:
    held, problem = built_in("attention"), parse_problem("attn b1 h2 q8 d16 fp32")
    inputs = held.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    seen: list[dict[str, object]] = []

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(options)
        return v

    references = []
    for name in (None, *held.variants):
        one = held if name is None else held.variant(name)
        one.call(fn, problem, inputs)
        references.append(one.reference(problem, inputs))  # the output and the log-sum-exp
    usual, another, default = seen
    assert usual == {"causal": False, "softmax_scale": 0.25}
    assert another["softmax_scale"] == 0.375
    assert default == {"causal": False}
    for with_usual, with_another, with_default in zip(*references, strict=True):
        assert not torch.allclose(with_usual, with_another, atol=1e-3)
        assert torch.equal(with_usual, with_default)
