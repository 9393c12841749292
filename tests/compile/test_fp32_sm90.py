"""The builds of fp32_gluon_sm90 fit a block."""

from __future__ import annotations

from collections.abc import Callable

import machine_code
import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.ops.attention.forward.fp32_sm90 import kernel
from flashmoe_science.ops.attention.problem import parse

H200 = GPUS["h200"]
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)
REST = ("d96", "d128", "d160", "d192 dv128")
# Bytes a thread: up to 128 columns, and of wider heads, which are ahead all the same (docs/notes/fp32.md). It is measured with
# Triton 3.6, where the narrow ones spill none to speak of; the assembler of Triton 3.9 spills more.
SPILLS = (16, 512) if machine_code.VERSION == "3.6" else (240, 568)


@pytest.mark.one_triton
@pytest.mark.parametrize("dim", ["d8", "d128 dv20", "d256", *(pytest.param(one, marks=REDUNDANT) for one in REST)])
def test_its_builds_fit_a_block(dim: str, built: Callable[..., Build]) -> None:
    problem = parse(f"attn b1 h2 q512 {dim} fp32 causal")
    (config,) = kernel.configs(problem, H200)
    build = built(compile_jobs(kernel.KERNEL, problem, config, H200)[0], H200, kernel.NAME, problem, config)
    assert build.refusal is None
    assert build.spill_bytes <= SPILLS[problem.head_dim > 128]
