"""The builds of Hopper's backwards: all that a call launches, what it spills, and that their products run beside each other."""

from __future__ import annotations

from collections.abc import Callable

import machine_code
import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.backward.fused_sm90.kernel import KERNEL as FUSED
from flashmoe_science.ops.attention.backward.split_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.call.backward import BackwardKernel
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem

REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)


# Bytes a thread, by the assembler of Triton 3.6, on which it is measured, and by the newest: numbers that are kept around the
# loops over queries, in which nothing is spilled.
@pytest.mark.parametrize(
    ("text", "spills", "newest"),
    [
        ("b4 h16 q4096 d128 bf16", 24, 0),
        ("b4 h16 q4096 d128 bf16 causal", 104, 160),
        ("b4 h8 q4096 d256 bf16 causal", 0, 192),
        pytest.param("b4 h32 q4096 d64 bf16", 72, 40, marks=REDUNDANT),
        pytest.param("b4 h32 q4096 d64 fp16 causal", 104, 224, marks=REDUNDANT),
        ("b4 h16 q4096 d96 bf16 causal", 64, 88),
        ("b4 h16 q4096 d192 dv128 bf16 causal", 56, 168),
        pytest.param("b4 h16 q4096 d160 bf16 causal", 48, 176, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d192 bf16 causal", 0, 16, marks=REDUNDANT),
        pytest.param("b1 h16 q32768 d128 bf16 causal", 104, 344, marks=REDUNDANT),
        pytest.param("b1 h16 q32768 d256 bf16", 0, 8, marks=REDUNDANT),
        ("b2 h16 q8192 d128 bf16 causal left1023 sinks", 88, 128),
        ("b8 h16 q4096 d128 bf16 causal packed", 80, 120),
        ("b4 h16 q4096 d128 bf16 causal softcap50", 0, 0),
        pytest.param("b4 h8 q4096 d256 bf16 causal left4095 softcap50", 72, 256, marks=REDUNDANT),
        pytest.param("b4 h32 q4096 d64 bf16 causal left1023", 112, 88, marks=REDUNDANT),
        pytest.param("b4 h32 q4096 d64 fp16 packed", 96, 88, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d128 bf16 left100 right100 packed", 104, 136, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d192 dv128 bf16 causal packed", 24, 152, marks=REDUNDANT),
        pytest.param("b4 h8 q4096 d256 bf16 causal left1023", 24, 240, marks=REDUNDANT),
        pytest.param("b1 h16 q65536 d128 bf16 causal packed", 80, 120, marks=REDUNDANT),
    ],
)
def test_all_that_a_call_launches_builds_and_fits(text: str, spills: int, newest: int, built: Callable[..., Build]) -> None:
    check(KERNEL, text, spills, newest, built)


@pytest.mark.parametrize(
    ("text", "spills", "newest"),
    [
        ("b4 h32 q4096 d64 bf16", 0, 16),
        ("b4 h32 hk8 q4096 d64 fp16 causal", 0, 16),
        ("b2 h32 q8192 d64 bf16 causal left1023 sinks", 0, 16),
        ("b8 h32 q4096 d64 bf16 causal packed", 0, 16),
        pytest.param("b8 h32 hk8 q4096 d64 fp16 packed", 0, 16, marks=REDUNDANT),
        pytest.param("b8 h32 q4096 d64 bf16 left100 right100 packed", 0, 16, marks=REDUNDANT),
        ("b4 h16 q4096 d128 bf16", 64, 0),
        ("b4 h32 hk8 q4096 d128 bf16 causal", 80, 80),
        ("b4 h16 q4096 d96 fp16 causal", 48, 80),
        pytest.param("b2 h16 q8192 d128 bf16 causal left1023 sinks", 80, 48, marks=REDUNDANT),
        pytest.param("b8 h32 hk8 q4096 d128 bf16 causal packed", 88, 24, marks=REDUNDANT),
        pytest.param("b4 h16 q4096 d96 dv72 bf16 packed", 24, 24, marks=REDUNDANT),
    ],
)
def test_the_fused_one_builds_without_a_spill_of_sums(text: str, spills: int, newest: int, built: Callable[..., Build]) -> None:
    """What it spills are addresses of products and thread numbers, a few loads a step."""
    check(FUSED, text, spills, newest, built)


def check(kernel: BackwardKernel, text: str, spills: int, newest: int, built: Callable[..., Build]) -> None:
    problem, gpu = parse_problem(f"attnbwd {text}"), gpu_named("h200")
    assert isinstance(problem, AttentionBackwardProblem)
    config = kernel.configs(problem, gpu)[0]
    found = [built(job, gpu, kernel.name, problem, config) for job in compile_jobs(kernel, problem, config, gpu)]
    for build in found:
        assert fits(build, gpu) is None, build.kernel
        assert build.spill_bytes <= (spills if machine_code.VERSION == "3.6" else newest), (
            f"{build.kernel}: spills {build.spill_bytes} bytes a thread"
        )
    promised = {(launch.name.strip("^$"), launch.threads) for launch in kernel.launches(problem, config, gpu)}
    assert {(build.kernel, build.threads) for build in found} == promised
