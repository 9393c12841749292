"""The builds of chunk_gluon_sm90 for windows, caps and sinks: first configs, and what they spill."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.kernel import CompileJob
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.forward.chunked_sm90.kernel import KERNEL
from flashmoe_science.ops.attention.problem import AttentionProblem

# Bytes a thread: a window's limits and a cap beside a wide output. Triton 3.6's assembler, on which it is measured, spills 24
# of a head of 256, Triton 3.9's 48; the form of one consumer, which spills 16, takes 1.27 times as long.
SPILLS_OF_256, SPILLS_CAPPED = 48, 24
AGAIN = (pytest.mark.slow, pytest.mark.again)


@pytest.mark.parametrize(
    ("text", "spills"),
    [
        ("attn b1 h16 hk8 q8192 d256 bf16 causal bshd left4095 softcap50", SPILLS_OF_256),
        pytest.param("attn b1 h64 hk8 q4096 d64 fp16 causal bshd left127 sinks", 0, marks=pytest.mark.one_triton),
        ("attn b4 h8 hk2 q64 k8192 d128 bf16 causal left1000 softcap30 sinks ragged page16", SPILLS_CAPPED),
        pytest.param("attn b1 h32 hk8 q8192 d128 bf16 causal bshd left4095", 0, marks=AGAIN),
        pytest.param("attn b4 h8 hk2 q64 k8192 d128 bf16 bshd left64 right64 softcap50 sinks packed", 0, marks=AGAIN),
        pytest.param("attn b2 h32 hk16 q4096 d128 bf16 causal bshd softcap50", 0, marks=AGAIN),
        pytest.param("attn b4 h8 hk2 q64 k8192 d128 bf16 causal left1000 sinks ragged", 0, marks=AGAIN),
    ],
)
def test_features_build_and_fit(text: str, spills: int, built: Callable[..., Build]) -> None:
    problem, gpu = parse_problem(text), gpu_named("h200")
    assert isinstance(problem, AttentionProblem)
    assert KERNEL.compile_job is not None
    config = KERNEL.configs(problem, gpu)[0]
    build = built(KERNEL.compile_job(problem, config, gpu), gpu, KERNEL.name, problem, config)
    assert fits(build, gpu) is None
    assert build.spill_bytes <= spills


MERGES = [(16, 3), (96, 5), (128, 2), (128, 8), (128, 16), (128, 33), (128, 128), (256, 128)]


@pytest.mark.one_triton
@pytest.mark.parametrize(  # sinks take registers more; without them a build of some and one of all splits at once
    ("width", "splits", "sinks"), [*((*sizes, "*bf16") for sizes in MERGES), (128, 16, None), (256, 128, None)]
)
def test_the_merge_builds_without_spills(width: int, splits: int, sinks: str | None, built: Callable[..., Build]) -> None:
    absent = {"cu_seqlens_q": None} | ({} if sinks else {"sinks": None})
    fixed = chunk_merge.constexprs(4, width, splits, early=True) | absent
    types = {"partials": "*fp32", "out_base": "*bf16", "lse_base": "*fp32", "sinks": sinks}
    signature = dict.fromkeys(chunk_merge.flashmoe_chunk_merge.arg_names, "i32") | types | dict.fromkeys(fixed, "constexpr")
    aligned = ("partials", "out_base", "stride_ob", "stride_oh", "stride_om")
    job = CompileJob(chunk_merge.flashmoe_chunk_merge, signature, fixed, aligned, chunk_merge.WARPS, 1, 128, gluon=True)
    build = built(job, gpu_named("h200"), KERNEL.name, f"d{width} bf16{' sinks' if sinks else ''}", f"num_splits={splits}")
    assert build.refusal is None
    assert build.spill_bytes == 0
