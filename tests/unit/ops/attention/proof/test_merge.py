"""The merge's oracle gives attention to all keys; its bounds admit both ways of PyTorch's operators."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.measure.tolerance import expected
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.ops.attention.proof.merge.oracle import merge_oracle
from flashmoe_science.problem import ProblemError

MERGE = operation("attention_merge")


def test_the_oracle_gives_attention_to_all_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 9, dtype=torch.float64, generator=generator)  # [heads, tokens, keys]
    values = torch.randn(2, 9, 4, dtype=torch.float64, generator=generator)
    scores[:, 1, :3] = scores[:, 2] = -torch.inf
    pieces = [(scores[..., keys], values[:, keys]) for keys in (slice(0, 3), slice(3, 9))]
    outs = torch.stack([(one.softmax(-1) @ value).transpose(0, 1) for one, value in pieces])  # NaN where no key is
    out, lse = merge_oracle(outs, torch.stack([one.logsumexp(-1) for one, _ in pieces]))
    torch.testing.assert_close(out, (scores.softmax(-1).nan_to_num(0.0) @ values).transpose(0, 1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("variant", [None, *MERGE.contract().sweep_variants])
@pytest.mark.parametrize("text", MERGE.contract().sweep())
def test_pytorchs_operators_are_within_the_bounds(text: str, variant: str | None) -> None:
    problem, contract = parse_problem(text), MERGE.contract() if variant is None else MERGE.contract().variant(variant)
    inputs = contract.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    right = contract.reference(problem, contract.widened(inputs))
    bounds = expected(right, contract.plain(problem, inputs), *contract.bounds(problem, inputs, right))
    given = contract.for_kernel(problem, contract.poisoned(problem, inputs))
    for peer in MERGE.peers():
        if peer.supports(problem, None) is None:
            for got, one in zip(peer.run(given, peer.configs(problem, None)[0]), bounds, strict=True):
                off = torch.where(got == one.value, 0.0, got.double() - one.value).abs()
                assert off.max() <= one.bound.max


def test_problems_are_read_and_written() -> None:
    assert str(MERGE.parse("attnmerge d128 t4096 p4 h32")) == "attnmerge p4 t4096 h32 d128 bf16"
    for text, words in (("p0 t1 h1 d1", "parts is 0"), ("t1 h1 d1", "lacks p<n>")):
        with pytest.raises(ProblemError, match=words):
            MERGE.parse(f"attnmerge {text}")
