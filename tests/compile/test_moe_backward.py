"""The builds of moe_bwd_triton: all that a call launches, for each architecture, and what it spills."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.compile.moe_backward import jobs_of, problem_of

pytest.importorskip("triton", reason="Triton is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.ops.moe.backward.grouped_triton.kernel import KERNEL

QWEN, UNEVEN = "t4096 e128 k8 d2048 f768 bf16", "t700 e16 k3 d520 f200 fp16 bias"
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)
FP32 = 8  # bytes a thread that six products of bf16 spill
pytestmark = pytest.mark.one_triton  # with the newest Triton test_kernels.py builds each kernel
NEWER_ON_L4 = 8  # and the second product of the forward's, in fp16 with Triton 3.9 on an L4


@pytest.mark.parametrize("gpu", [*(pytest.param(one, marks=REDUNDANT) for one in ("a100", "b200")), "l4", "h200"])
@pytest.mark.parametrize(
    ("text", "spills"),
    [
        (QWEN, 0),
        (UNEVEN, NEWER_ON_L4),
        pytest.param("t64 e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed", 0, marks=REDUNDANT),
        pytest.param("t256 e8 k2 d1000 f520 fp32 gelu ungated", FP32, marks=REDUNDANT),
    ],
)
def test_all_that_a_call_launches_builds_and_fits(text: str, spills: int, gpu: str, built: Callable[..., Build]) -> None:
    problem, device = problem_of(text), gpu_named(gpu)
    assert device is not None
    config = KERNEL.configs(problem, device)[0]
    jobs = jobs_of(KERNEL, problem, config, device)
    # One function computes dW1 and dW2.
    found = [built(job, device, KERNEL.name, problem, f"{number}: {config}") for number, job in enumerate(jobs)]
    for build in found:
        assert fits(build, device) is None, build.kernel
        assert build.spill_bytes <= spills, f"{build.kernel}: spills {build.spill_bytes} bytes a thread"
    promised = {(launch.name.strip("^$"), launch.threads) for launch in KERNEL.launches(problem, config, device)}
    assert {(build.kernel, build.threads) for build in found} >= promised
