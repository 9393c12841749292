"""What is built before a run, in which batches, by how many processes, and that a fault there stays without effect."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.contract import built_in
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.measure import prebuild as module
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.inputs import Case, make
from flashmoe_science.measure.prebuild import Todo, batches, plan_once, prebuild
from flashmoe_science.operations import kernel_named, parse_problem

H200 = gpu_named("h200")
TRITON = kernel_named("fwd_triton")
TEXTS = ("attn b1 h2 q64 d64 fp16", "attn b4 h2 q128 d64 fp16", "attn b1 h2 q64 d128 fp16")


def todo(*texts: str, configs: int = 2) -> Todo:
    problems = [parse_problem(text) for text in texts]
    return [
        (problem, [(kernel.name, str(config)) for kernel in (TRITON, kernel_named("sdpa"))
                   for config in kernel.configs(problem, H200)[:configs]])
        for problem in problems
    ]  # fmt: skip


def test_every_config_of_ours_is_built_once_and_no_peer_is() -> None:
    builds = [build for batch in batches("attention", todo(*TEXTS)) for build in batch]
    wanted = {(text, "fwd_triton", str(config)) for text in TEXTS for config in TRITON.configs(parse_problem(text), H200)[:2]}
    assert set(builds) == wanted
    assert len(builds) == len(wanted)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose GPU has memory for two processes; they begin without asking for a device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 << 30, 139 << 30))
    monkeypatch.setattr(module, "_MAX_WORKERS", 2)
    monkeypatch.setattr(module, "processors", lambda: 4)
    monkeypatch.setattr(module, "_use_device", int)
    return Bench(torch.device("cpu"), H200)


def test_processes_that_die_are_nobodys_finding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(module, "_use_device", os._exit)
    prebuild(bench, "attention", todo(*TEXTS), math.inf, told.append)
    assert told == ["building 6 kernels"]


def test_what_is_planned_has_the_shapes_and_strides_of_the_runs_inputs_with_every_output_and_as_timed() -> None:
    planned, bound = [], []
    unbound = SimpleNamespace(bind=lambda tensors, options, out: bound.append(tensors))
    problem = parse_problem("attn b2 h4 hk2 q8 k16 d32 dv16 bf16 bshd")
    kernel = replace(TRITON, plan=lambda inputs, config: planned.append((inputs, config)) or unbound)
    plan_once(problem, kernel, Config(block_m=64), torch.device("cpu"))
    real = make(built_in(problem.op), problem, torch.device("cpu"), Case(1))
    assert [inputs.return_lse for inputs, _ in planned] == [True, False]
    for inputs, config in planned:
        assert config == Config(block_m=64)
        assert (inputs.problem, inputs.softmax_scale) == (problem, problem.softmax_scale)
        for mine, theirs in ((inputs.q, real["q"]), (inputs.k, real["k"]), (inputs.v, real["v"])):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    named = [real[name] for name in ("q", "k", "v")]
    assert len(bound) == 2
    for tensors in bound:
        assert [(one.shape, one.stride()) for one in tensors[:3]] == [(one.shape, one.stride()) for one in named]


@pytest.mark.gpu
def test_what_is_built_is_found_in_tritons_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.measure.bench import bench_here

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the processes inherit it
    here, told = bench_here(), []
    prebuild(here, "attention", todo(*TEXTS), math.inf, told.append)
    assert told[-1] == "built 6 of 6 kernels"
    built = {path.parent.name for path in tmp_path.rglob("*.cubin")}
    assert len(built) >= 6  # two configs and two forms of the epilogue, for two head dimensions or more
