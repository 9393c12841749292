"""The builds of decode_gluon for pages, windows and sinks: what they spill, and when Q and the first keys are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import GPUS, Gpu
from flashmoe_science.hardware.target import Build
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.forward.splitkv import decode as kernel

pytestmark = pytest.mark.one_triton
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)


@pytest.mark.parametrize(
    "gpu", [GPUS["h200"], pytest.param(GPUS["a100"], marks=REDUNDANT), GPUS["l4"]], ids=lambda gpu: gpu.name
)
@pytest.mark.parametrize(
    "text",
    [
        "attn b1 h32 hk8 q1 k8192 d128 bf16",
        "attn b1 h32 hk8 q4 k8000 d128 fp16 causal bshd ragged page16 leftpad",
        "attn b1 h32 hk8 q1 k8000 d64 bf16 bshd left127 sinks ragged page64",
        "attn b1 h12 hk4 q3 k1000 d96 dv40 bf16 causal",
        "attn b8 h32 hk8 q1 k32768 d128 bf16 bshd ragged page16",
    ],
)
def test_its_builds_fit_and_the_first_spills_nothing(text: str, gpu: Gpu, built: Callable[..., Build]) -> None:
    problem = parse_problem(text)
    configs = kernel.configs(problem, gpu)
    assert configs
    for place, config in enumerate(configs[:2]):
        build = built(compile_jobs(kernel.KERNEL, problem, config, gpu)[0], gpu, kernel.NAME, problem, config)
        assert build.refusal is None
        assert build.spill_bytes <= 16 * place, config  # none where nothing was measured


def test_q_and_the_first_keys_are_on_their_way_before_anything_is_waited_for(compiled: Callable[..., Any]) -> None:
    problem, gpu = parse_problem("attn b1 h32 hk8 q1 k8192 d128 bf16"), GPUS["h200"]
    config = kernel.configs(problem, gpu)[0]
    ptx = compiled(compile_jobs(kernel.KERNEL, problem, config, gpu)[0], gpu, kernel.NAME, problem, config).asm["ptx"]
    assert ptx.index("cp.async.cg") < ptx.index("cp.async.wait_group")
    assert "ld.global" not in ptx[: ptx.index("cp.async.wait_group")]  # nothing comes by way of registers
