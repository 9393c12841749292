"""The builds of chunk_gluon_sm90 for windows, caps and sinks: first configs, and what they spill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.forward.chunked_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.launch import Pointer, collect_builds

# Bytes a thread: a window's limits and a cap beside a wide output. Triton 3.6's assembler, on which it is measured, spills 24
# of a head of 256, Triton 3.9's 48; the form of one consumer, which spills 16, takes 1.27 times as long.
SPILLS_OF_256, SPILLS_CAPPED = 48, 24
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)


@pytest.mark.parametrize(
    ("text", "spills"),
    [
        ("attn b1 h16 hk8 q8192 d256 bf16 causal bshd left4095 softcap50", SPILLS_OF_256),
        pytest.param("attn b1 h64 hk8 q4096 d64 fp16 causal bshd left127 sinks", 0, marks=pytest.mark.one_triton),
        ("attn b4 h8 hk2 q64 k8192 d128 bf16 causal left1000 softcap30 sinks ragged page16", SPILLS_CAPPED),
        pytest.param("attn b1 h32 hk8 q8192 d128 bf16 causal bshd left4095", 0, marks=REDUNDANT),
        pytest.param("attn b4 h8 hk2 q64 k8192 d128 bf16 bshd left64 right64 softcap50 sinks packed", 0, marks=REDUNDANT),
        pytest.param("attn b2 h32 hk16 q4096 d128 bf16 causal bshd softcap50", 0, marks=REDUNDANT),
        pytest.param("attn b4 h8 hk2 q64 k8192 d128 bf16 causal left1000 sinks ragged", 0, marks=REDUNDANT),
    ],
)
def test_features_build_and_fit(text: str, spills: int, built: Callable[..., Build]) -> None:
    problem, gpu = parse(text), gpu_named("h200")
    config = KERNEL.configs(problem, gpu)[0]
    build = built(compile_jobs(KERNEL, problem, config, gpu)[0], gpu, KERNEL.name, problem, config)
    assert fits(build, gpu) is None
    assert build.spill_bytes <= spills


MERGES = [(16, 3), (96, 5), (128, 2), (128, 8), (128, 16), (128, 33), (128, 128), (256, 128)]


@pytest.mark.one_triton
@pytest.mark.parametrize(  # sinks take registers more; without them a build of some and one of all splits at once
    ("width", "splits", "sinks"), [*((*sizes, True) for sizes in MERGES), (128, 16, False), (256, 128, False)]
)
def test_the_merge_builds_without_spills(width: int, splits: int, sinks: bool, built: Callable[..., Build]) -> None:
    fixed, gpu = tuple(chunk_merge.constexprs(4, width, splits, early=True).values()), gpu_named("h200")
    out, lse = Pointer(torch.bfloat16), Pointer(torch.float32, 4)
    with collect_builds(gpu) as jobs:
        chunk_merge.build(out, lse, None, Pointer(torch.bfloat16, 4) if sinks else None, (width, width, width), fixed, True)
    build = built(*jobs, gpu, KERNEL.name, f"d{width} bf16{' sinks' if sinks else ''}", f"num_splits={splits}")
    assert build.refusal is None
    assert build.spill_bytes == 0
