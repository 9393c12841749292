"""The MoE contract: its routing touches what the problem counts, its peers are right, a wrong layer is not."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.contract import built_in, is_built_in
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.kernels import PEERS
from flashmoe_science.ops.moe.peers.expert_loop import expert_loop
from flashmoe_science.ops.moe.problem import MoEProblem

CPU = torch.device("cpu")
HELD = built_in("moe")
PROBLEMS = ("moe t1 e8 k3 d16 f8 bf16", "moe t3 e8 k3 d16 f8 fp16", "moe t50 e7 k3 d24 f40 fp32", "moe t9 e4 k4 d64 f32 bf16")


def drawn(text: str, distribution: str = "normal", seed: int = 1) -> tuple[MoEProblem, dict[str, torch.Tensor]]:
    problem = parse_problem(text)
    assert isinstance(problem, MoEProblem)
    return problem, HELD.vary(distribution, HELD.inputs(problem, CPU, torch.Generator().manual_seed(seed)))


def wrong(problem: MoEProblem, inputs: dict[str, torch.Tensor], got: torch.Tensor) -> list[str]:
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    (one,) = expected([HELD.reference(problem, exact)], [HELD.plain(problem, inputs)], None)
    return check_output("out", got, one.value, one.bound)[1]


@pytest.mark.parametrize("text", PROBLEMS)
def test_routing_touches_every_expert_that_it_can_and_none_twice_a_token(text: str) -> None:
    problem, inputs = drawn(text)
    ids = inputs["topk_ids"]
    assert ids.shape == (problem.tokens, problem.top_k)
    assert len(ids.unique()) == problem.touched()
    assert all(len(set(row)) == problem.top_k for row in ids.tolist())
    assert inputs["topk_weights"].dtype == torch.float32
    torch.testing.assert_close(inputs["topk_weights"].sum(1), torch.ones(problem.tokens))


def test_inputs_are_the_seeds() -> None:
    (_, first), (_, again), (_, other) = drawn(PROBLEMS[2]), drawn(PROBLEMS[2]), drawn(PROBLEMS[2], seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["topk_ids"], other["topk_ids"])


@pytest.mark.parametrize("distribution", HELD.distributions)
@pytest.mark.parametrize("text", PROBLEMS)
def test_the_peers_are_right(text: str, distribution: str) -> None:
    problem, inputs = drawn(text, distribution)
    able = [peer for peer in PEERS if peer.cannot(problem, None) is None]
    assert able
    for peer in able:
        got = peer.run(HELD.for_kernel(problem, inputs), peer.configs(problem, None)[0])
        assert got.dtype == inputs["x"].dtype
        assert wrong(problem, inputs, got) == [], peer.name


def test_a_layer_without_its_routing_weights_is_wrong() -> None:
    problem, inputs = drawn(PROBLEMS[2])
    even = torch.full_like(inputs["topk_weights"], 1 / problem.top_k)
    got = HELD.call(expert_loop, problem, inputs | {"topk_weights": even})
    assert wrong(problem, inputs, got)


def test_it_comes_with_the_package() -> None:
    assert is_built_in(HELD)
    assert HELD.cannot(parse_problem("attn b1 h1 q8 d8 bf16")) is not None
    for text in HELD.default_problems():
        assert parse_problem(str(text)).op == "moe"
