"""The builds of Hopper's backwards: all that a call launches, what it spills, and that their products run beside each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import machine_code
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.ops.attention.backward.fused_sm90.kernel import KERNEL as FUSED
from flashmoe_science.ops.attention.backward.split_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.call.backward import BackwardKernel, Wanted
from flashmoe_science.ops.attention.problem.backward import parse
from flashmoe_science.ops.attention.proof.backward.contract import CONTRACT
from flashmoe_science.ops.launch import collect_builds

REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)


# Bytes a thread, by the assembler of Triton 3.6, on which it is measured, and by the newest: numbers that are kept around the
# loops over queries, in which nothing is spilled.
@pytest.mark.one_triton
@pytest.mark.parametrize(
    ("text", "spills", "newest"),
    [
        ("b4 h16 q4096 d128 bf16", 24, 0),
        ("b4 h16 q4096 d128 bf16 causal", 104, 160),
        ("b4 h8 q4096 d256 bf16 causal", 16, 8),
        pytest.param("b4 h32 q4096 d64 bf16", 72, 40, marks=REDUNDANT),
        pytest.param("b4 h32 q4096 d64 fp16 causal", 104, 224, marks=REDUNDANT),
        ("b4 h16 q4096 d96 bf16 causal", 64, 88),
        ("b4 h16 q4096 d192 dv128 bf16 causal", 0, 16),
        pytest.param("b4 h16 q4096 d160 bf16 causal", 48, 176, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d192 bf16 causal", 0, 8, marks=REDUNDANT),
        pytest.param("b1 h16 q32768 d128 bf16 causal", 104, 344, marks=REDUNDANT),
        pytest.param("b1 h16 q32768 d256 bf16", 0, 0, marks=REDUNDANT),
        ("b2 h16 q8192 d128 bf16 causal left1023 sinks", 88, 128),
        ("b8 h16 q4096 d128 bf16 causal packed", 80, 120),
        ("b4 h16 q4096 d128 bf16 causal softcap50", 0, 0),
        pytest.param("b4 h8 q4096 d256 bf16 causal left4095 softcap50", 40, 32, marks=REDUNDANT),
        pytest.param("b4 h32 q4096 d64 bf16 causal left1023", 112, 88, marks=REDUNDANT),
        pytest.param("b4 h32 q4096 d64 fp16 packed", 96, 88, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d128 bf16 left100 right100 packed", 104, 136, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d192 dv128 bf16 causal packed", 0, 16, marks=REDUNDANT),
        pytest.param("b4 h8 q4096 d256 bf16 causal left1023", 0, 16, marks=REDUNDANT),
        pytest.param("b1 h16 q65536 d128 bf16 causal packed", 80, 120, marks=REDUNDANT),
    ],
)
def test_all_that_a_call_launches_builds_and_fits(text: str, spills: int, newest: int, built: Callable[..., Build]) -> None:
    check(KERNEL, text, spills, newest, built)


# Instructions of products over a tile: of scores and dP, of dV and of dK.
@pytest.mark.one_triton
@pytest.mark.parametrize(
    ("text", "both", "each"),
    [("d128 bf16 causal", 64, 16), ("d256 bf16", 64, 4), pytest.param("d64 bf16", 16, 16, marks=REDUNDANT)],
)
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (True, False, True), (True, True, False)])
def test_what_is_not_wanted_is_not_multiplied(
    text: str, both: int, each: int, wanted: tuple[bool, bool, bool], compiled: Callable[..., Any]
) -> None:
    problem, gpu = parse(f"attnbwd b4 h16 q4096 {text}"), gpu_named("h200")
    config = KERNEL.configs(problem, gpu)[0]
    with collect_builds(gpu) as jobs:
        inputs = CONTRACT.for_kernel(problem, CONTRACT.inputs(problem, torch.device("meta"), torch.Generator()))
        CONTRACT.planned(KERNEL, config, replace(inputs, wanted=Wanted(*wanted)))
    functions = [job.function.__name__ for job in jobs]
    assert ("flashmoe_bwd_dq_gluon_sm90" in functions) == wanted[0]
    names = [name for name, one in zip(Wanted._fields, wanted, strict=False) if one]
    of_keys = jobs[functions.index("flashmoe_bwd_dkdv_gluon_sm90")]
    ptx = compiled(of_keys, gpu, KERNEL.name, f"{problem}, {' '.join(names)}", config).asm["ptx"]
    assert ptx.count("wgmma.mma_async") == both + each * sum(wanted[1:])
    assert ("cp.async.bulk.tensor.2d.global" in ptx) == wanted[0]  # dS goes out


@pytest.mark.parametrize(
    ("text", "spills", "newest"),
    [
        ("b4 h32 q4096 d64 bf16", 0, 16),
        pytest.param("b4 h32 hk8 q4096 d64 fp16 causal", 0, 16, marks=pytest.mark.one_triton),
        ("b2 h32 q8192 d64 bf16 causal left1023 sinks", 0, 16),
        pytest.param("b8 h32 q4096 d64 bf16 causal packed", 0, 16, marks=pytest.mark.one_triton),
        pytest.param("b8 h32 hk8 q4096 d64 fp16 packed", 0, 16, marks=REDUNDANT),
        pytest.param("b8 h32 q4096 d64 bf16 left100 right100 packed", 0, 16, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d128 bf16", 0, 0, marks=pytest.mark.one_triton),
        ("b4 h32 hk8 q4096 d128 bf16 causal", 16, 88),
        ("b4 h16 q4096 d96 fp16 causal", 48, 0),
        pytest.param("b2 h16 q8192 d128 bf16 causal left1023 sinks", 8, 24, marks=REDUNDANT),
        pytest.param("b8 h32 hk8 q4096 d128 bf16 causal packed", 0, 32, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d96 dv72 bf16 packed", 8, 32, marks=REDUNDANT),
    ],
)
def test_the_fused_one_builds_without_a_spill_of_sums(text: str, spills: int, newest: int, built: Callable[..., Build]) -> None:
    """What it spills are addresses of products and thread numbers, a few loads a step."""
    check(FUSED, text, spills, newest, built)


def check(kernel: BackwardKernel, text: str, spills: int, newest: int, built: Callable[..., Build]) -> None:
    problem, gpu = parse(f"attnbwd {text}"), gpu_named("h200")
    config = kernel.configs(problem, gpu)[0]
    found = [built(job, gpu, kernel.name, problem, config) for job in compile_jobs(kernel, problem, config, gpu)]
    for build in found:
        assert fits(build, gpu) is None, build.kernel
        assert build.spill_bytes <= (spills if machine_code.VERSION == "3.6" else newest), (
            f"{build.kernel}: spills {build.spill_bytes} bytes a thread"
        )
    promised = {(launch.name.strip("^$"), launch.threads) for launch in kernel.launches(problem, config, gpu)}
    assert {(build.kernel, build.threads) for build in found} == promised
