"""The share of a run that is over: it only grows, from nothing to all, and long problems weigh more than short ones."""

from __future__ import annotations

from flashmoe_science.dispatch.registry import OURS, kernel_named
from flashmoe_science.measure.course import course
from flashmoe_science.measure.round import Plan
from flashmoe_science.measure.timing import FULL

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import parse_problem

H200 = gpu_named("h200")
PEERS = tuple(kernel_named(name) for name in ("sdpa", "sdpa_flash", "sdpa_cudnn", "fa3"))
FEW, MANY = parse_problem("attn b1 h1 q4 d4 fp32"), parse_problem("attn b1 h16 q4096 d128 bf16")


def plan(warm: bool = False) -> Plan:
    return Plan(OURS, PEERS, 4, FULL, False, 1, None, warm)


def test_the_share_grows_from_nothing_to_all() -> None:
    ahead = course((FEW, MANY, FEW), plan(), H200)
    shares = [ahead.at_building(done, 50) for done in range(51)]
    shares += [ahead.at_path(index) for index in range(3)]
    shares += [ahead.at_round(index, step) for index in range(3) for step in (0, 5, 10, 10_000)]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert 0.95 < shares[-1] < 1.0
    assert ahead.at_round(3, 0) == 1.0


def test_a_problem_weighs_by_the_kernels_that_serve_it() -> None:
    ahead = course((FEW, MANY), plan(), H200)
    assert ahead.rounds[1] > 1.5 * ahead.rounds[0]
    assert ahead.steps[1] > ahead.steps[0]


def test_warm_rows_take_time_too() -> None:
    assert course((MANY,), plan(warm=True), H200).rounds > course((MANY,), plan(), H200).rounds


def test_on_a_cpu_there_are_only_rounds() -> None:
    on_cpu = Plan((kernel_named("sdpa"),), (kernel_named("sdpa_math"),), 1, FULL, False, 1, None)
    ahead = course((FEW, FEW), on_cpu, None)
    assert (ahead.building, ahead.paths) == (0.0, ())
    assert ahead.at_round(1, 0) == 0.5


def test_nothing_to_do_is_all_done() -> None:
    assert course((), plan(), None).at_round(0, 0) == 1.0
