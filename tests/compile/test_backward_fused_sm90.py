"""The builds of bwd_fused_gluon_sm90: all that a call launches, without a spill."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.backward.fused_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem


@pytest.mark.parametrize("text", ["b4 h32 q4096 d64 bf16", "b4 h32 hk8 q4096 d64 fp16 causal"])
def test_all_that_a_call_launches_builds_and_fits(text: str, built: Callable[..., Build]) -> None:
    problem, gpu = parse_problem(f"attnbwd {text}"), gpu_named("h200")
    assert isinstance(problem, AttentionBackwardProblem)
    config = KERNEL.configs(problem, gpu)[0]
    found = [built(job, gpu, KERNEL.name, problem, config) for job in compile_jobs(KERNEL, problem, config, gpu)]
    for build in found:
        assert fits(build, gpu) is None, build.kernel
        assert build.spill_bytes == 0, build.kernel
    promised = {(launch.name.strip("^$"), launch.threads) for launch in KERNEL.launches(problem, config, gpu)}
    assert {(build.kernel, build.threads) for build in found} == promised
