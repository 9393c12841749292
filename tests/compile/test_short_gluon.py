"""The builds of short_gluon spill nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.forward import short_gluon as kernel

H200 = GPUS["h200"]


@pytest.mark.one_triton
@pytest.mark.parametrize("text", ["q500 d64 fp16 causal", "q128 d64 bf16", "q250 d128 bf16 causal", "q100 d40 dv8 fp16"])
def test_its_builds_spill_nothing(text: str, built: Callable[..., Build]) -> None:
    problem = parse_problem(f"attn b1 h2 {text}")
    for config in kernel.configs(problem, H200):
        build = built(compile_jobs(kernel.KERNEL, problem, config, H200)[0], H200, kernel.NAME, problem, config)
        assert (build.refusal, build.spill_bytes) == (None, 0), config
