"""The builds of the portable backwards: all that a call launches, for each architecture, and what it spills."""

from __future__ import annotations

from collections.abc import Callable

import machine_code
import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.ops.attention.backward.short_triton.kernel import KERNEL as SHORT
from flashmoe_science.ops.attention.backward.tiled_triton.kernel import KERNEL
from flashmoe_science.ops.attention.problem.backward import parse

# Bytes a thread. Masks and biases are read beside the products of dK and dV: where a tile just fits the registers they spill a
# few; dBias has the tile of dQ. fp32 is six products of bf16, whose operands take three times the registers.
USUAL, BIASED, SUMMED, FP32, WIDE_FP32 = 0, 128, 320, 64, 512
OF_SHORT = 240  # 64 keys of 128 columns in four warps on Hopper: the fastest that was measured
HOPPER = 56  # of 128 keys: faster than the tile that spills none (docs/notes/backward.md)
WIDE = 0 if machine_code.VERSION == "3.6" else 8  # the assembler of Triton 3.8, for an L4
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)


@pytest.mark.one_triton
@pytest.mark.parametrize("gpu", [pytest.param("a100", marks=REDUNDANT), "l4", "h200"])
@pytest.mark.parametrize(
    ("text", "spills"),
    [
        ("b2 h16 q4096 d64 bf16 causal", USUAL),
        pytest.param("b2 h16 q4096 d128 bf16", USUAL, marks=REDUNDANT),
        ("b2 h16 q4096 d128 bf16 causal", USUAL),
        ("b2 h16 q4096 d256 bf16 causal", WIDE),
        pytest.param("b2 h16 q4096 d192 dv128 bf16 causal", USUAL, marks=REDUNDANT),
        ("b4 h8 hk2 q1024 d128 bf16 causal bshd left100 sinks packed", USUAL),
        pytest.param("b2 h16 q1000 d128 fp16 boolmask", BIASED, marks=REDUNDANT),
        pytest.param("b2 h16 q1000 d64 fp16 bias softcap20", SUMMED, marks=REDUNDANT),
        pytest.param("b2 h16 q4096 d64 fp32 causal", FP32, marks=REDUNDANT),
        pytest.param("b2 h16 q4096 d256 fp32 causal", WIDE_FP32, marks=REDUNDANT),
    ],
)
def test_all_that_a_call_launches_builds_and_fits(text: str, spills: int, gpu: str, built: Callable[..., Build]) -> None:
    problem, device = parse(f"attnbwd {text}"), gpu_named(gpu)
    config = KERNEL.configs(problem, device)[0]
    for job in compile_jobs(KERNEL, problem, config, device):
        build = built(job, device, KERNEL.name, problem, config)
        assert fits(build, device) is None, build.kernel
        limit = max(spills, HOPPER) if gpu == "h200" else spills
        assert build.spill_bytes <= limit, f"{build.kernel}: spills {build.spill_bytes} bytes a thread"


@pytest.mark.one_triton
@pytest.mark.parametrize("gpu", [pytest.param("a100", marks=REDUNDANT), "l4", "h200"])
@pytest.mark.parametrize("text", ["b1 h16 q512 d64 bf16 causal", "b1 h16 q500 d128 fp16", "b2 h8 hk2 q128 d96 bf16 causal"])
def test_one_launch_of_short_sequences_builds_and_fits(text: str, gpu: str, built: Callable[..., Build]) -> None:
    problem, device = parse(f"attnbwd {text}"), gpu_named(gpu)
    config = SHORT.configs(problem, device)[0]
    (job,) = compile_jobs(SHORT, problem, config, device)
    build = built(job, device, SHORT.name, problem, config)
    assert fits(build, device) is None
    assert build.spill_bytes <= (OF_SHORT if gpu == "h200" and problem.head_dim > 64 else 0)
