"""What is built before a run, in which batches, by how many processes, and that a fault there stays without effect."""

from __future__ import annotations

import operator
import os
from dataclasses import replace

import pytest
import torch
from flashmoe_science.dispatch.registry import OURS, kernel_named
from flashmoe_science.measure.paths import Todo

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure import prebuild as module
from flashmoe_science.measure.bench import Bench, Candidate
from flashmoe_science.measure.prebuild import Build, batches, plan_once, prebuild, tensor_bytes, workers
from flashmoe_science.operations import parse_problem

H200 = gpu_named("h200")
TRITON = kernel_named("fwd_triton")
BOTH = (TRITON, kernel_named("sdpa"))
TEXTS = ("attn b1 h2 q64 d64 fp16", "attn b4 h2 q128 d64 fp16", "attn b1 h2 q64 d128 fp16")


def todo(*texts: str, kernels=BOTH, configs: int = 2) -> list[Todo]:
    problems = [parse_problem(text) for text in texts]
    return [
        Todo(
            problem,
            tuple(Candidate(kernel, config) for kernel in kernels for config in kernel.configs(problem, H200)[:configs]),
        )
        for problem in problems
    ]


def test_every_config_of_ours_is_built_with_and_without_lse_and_no_peer_is() -> None:
    builds = [build for batch in batches(todo(*TEXTS)) for build in batch]
    wanted = {
        Build(text, "fwd_triton", str(config), lse)
        for text in TEXTS
        for config in TRITON.configs(parse_problem(text), H200)[:2]
        for lse in (False, True)
    }
    assert set(builds) == wanted
    assert len(builds) == len(wanted)


def test_a_problem_named_twice_is_built_once() -> None:
    assert batches(todo(TEXTS[0], TEXTS[0])) == batches(todo(TEXTS[0]))


def test_likely_equal_builds_are_one_processs_work_and_the_longest_batch_comes_first() -> None:
    kernel = replace(TRITON, configs=lambda problem, device: (Config(block_m=64),))
    found = batches(todo(*TEXTS, kernels=(kernel,), configs=1))
    assert [[build.problem for build in batch] for batch in found] == [[*TEXTS[:2]], [*TEXTS[:2]], [TEXTS[2]], [TEXTS[2]]]
    assert [{build.return_lse for build in batch} for batch in found] == [{False}, {True}, {False}, {True}]


@pytest.mark.parametrize(
    ("cpus", "host_gib", "device_gib", "expected"),
    [(16, 128, 139, 14), (8, 128, 139, 7), (1, 128, 139, 1), (16, 12, 139, 4), (16, 128, 6, 5), (16, 128, 0.1, 0)],
)
def test_processes_are_limited_by_processors_and_by_memory(cpus: int, host_gib: int, device_gib: float, expected: int) -> None:
    many = tuple((Build("attn b1 h2 q64 d64 fp16", "fwd_triton", "", lse),) for lse in (False, True) for _ in range(10))
    assert workers(many, cpus, host_gib << 30, int(device_gib * 2**30)) == expected


def test_big_tensors_leave_room_for_fewer_processes() -> None:
    big = "attn b64 h32 q16384 d128 bf16"
    assert tensor_bytes(parse_problem(big)) == 4 * 64 * 32 * 16384 * 128 * 2 + 64 * 32 * 16384 * 4
    assert workers(tuple((Build(big, "fwd_triton", "", True),) for _ in range(20)), 16, 128 << 30, 139 << 30) == 2


def test_nothing_is_built_where_there_is_no_gpu_or_little_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ProcessPoolExecutor", lambda *args, **named: pytest.fail("processes were started"))
    prebuild(Bench(torch.device("cpu"), None), todo(*TEXTS), None, lambda done, total: None)
    prebuild(Bench(torch.device("cpu"), H200), todo(TEXTS[0], configs=1), None, lambda done, total: None)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose GPU has memory for two processes; they begin without asking for a device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 << 30, 139 << 30))
    monkeypatch.setattr(module, "workers", lambda *given: 2)
    monkeypatch.setattr(module, "_begin", int)
    return Bench(torch.device("cpu"), H200)


def test_progress_goes_from_nothing_to_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "_build", operator.is_)  # stands in for planning: any function that can be sent
    prebuild(bench, todo(*TEXTS), None, lambda done, total: told.append((done, total)))
    assert (told[0], told[-1]) == ((0, 12), (12, 12))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_processes_that_die_are_nobodys_finding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(module, "_begin", os._exit)
    prebuild(bench, todo(*TEXTS), None, lambda done, total: told.append(done))
    assert told == [0]


def test_what_is_planned_has_the_shapes_and_strides_of_the_runs_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.measure.inputs import make_inputs

    planned = []
    problem = parse_problem("attn b2 h4 hk2 q8 k16 d32 dv16 bf16 bshd")
    kernel = replace(OURS[0], plan=lambda inputs, config: planned.append((inputs, config)))
    monkeypatch.setattr("flashmoe_science.dispatch.registry.kernel_named", lambda name: kernel)
    plan_once(Build(str(problem), kernel.name, "block_m=64", True), torch.device("cpu"))
    ((inputs, config),) = planned
    real = make_inputs(problem, torch.device("cpu"), 1, 0).first
    assert config == Config(block_m=64)
    assert (inputs.problem, inputs.softmax_scale, inputs.return_lse) == (problem, real.softmax_scale, True)
    for mine, theirs in ((inputs.q, real.q), (inputs.k, real.k), (inputs.v, real.v)):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert inputs.out.shape == (2, 4, 8, 16)


@pytest.mark.gpu
def test_what_is_built_is_found_in_tritons_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.measure.bench import bench_here

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the processes inherit it
    here, told = bench_here(), []
    prebuild(here, todo(*TEXTS), None, lambda done, total: told.append((done, total)))
    assert told[-1] == (12, 12)
    built = {path.parent.name for path in tmp_path.rglob("*.cubin")}
    assert len(built) >= 6  # two configs and two forms of the epilogue, for two head dimensions or more
