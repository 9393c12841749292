"""The launches of a step of training, by name, and its memory."""

from __future__ import annotations

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Launch
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.route.step import launches_around, workspace_around

H200, OURS = gpu_named("h200"), Launch("^ours$")


def problem(words: str) -> MoEBackwardProblem:
    made = parse_problem(f"moebwd t4096 e128 k8 d2048 f768 bf16{words}")
    assert isinstance(made, MoEBackwardProblem)
    return made


def test_a_step_launches_the_router_and_the_forward_before_and_the_routers_backward_after() -> None:
    assert launches_around(problem(""), H200, OURS) == (OURS,)
    names = [one.name.strip("^$") for one in launches_around(problem(" logits"), H200, OURS)]
    assert (names[0], names[-2:]) == ("flashmoe_moe_route", ["ours", "flashmoe_moe_droute"])
    assert "flashmoe_moe_combine" in names[1:-2]


def test_a_step_takes_the_pre_activations_too() -> None:
    pairs = 4096 * 8
    assert workspace_around(problem(""), 7) == 7
    assert workspace_around(problem(" logits"), 7) > 7 + 2 * pairs * 2 * 768 + 2 * 4096 * 2048 + 12 * pairs
