"""Builds of fwd_gluon_sm90: what those of three consumers, of heads of no power of two and of caps spill, and where V is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import machine_code
import pytest

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.ops.attention.forward.prefill_sm90 import config as host
from flashmoe_science.ops.attention.forward.prefill_sm90 import kernel
from flashmoe_science.ops.attention.problem import parse

REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)
pytestmark = pytest.mark.one_triton  # with the newest Triton test_kernels.py builds each kernel
NEWER = pytest.mark.xfail(
    machine_code.VERSION != "3.6", raises=AssertionError, strict=True, reason="Triton 3.9's assembler spills more: 32 and 48"
)
# An odd number of keys: elements of the bias are read one at a time.
SPILLS_OF_ODD_BIAS = 136 if machine_code.VERSION == "3.6" else 80


# Bytes a thread, around the loops. Triton 3.6's assembler, on which it is measured, spills 16 of the capped D 256, else none or
# 8 without a bias; Triton 3.9's as many as are allowed here. Where three consumers spill, the loop over keys is ordered to save
# registers, and is 9% slower.
@pytest.mark.parametrize(
    ("text", "spills"),
    [
        ("attn b2 h16 q4096 d192 bf16", 8),
        pytest.param("attn b4 h32 q4096 d64 bf16 causal", 0, marks=pytest.mark.one_triton),
        pytest.param("attn b8 h16 q1886 k13432 d64 bf16 causal", 0, marks=(*REDUNDANT, NEWER)),
        ("attn b4 h32 q4097 d64 bf16", 0 if machine_code.VERSION == "3.6" else 32),
        pytest.param("attn b2 h16 q1000 k3001 d160 fp16 causal", 0, marks=pytest.mark.one_triton),
        ("attn b2 h16 q3000 k5001 d192 dv128 bf16 causal", 0 if machine_code.VERSION == "3.6" else 8),
        pytest.param("attn b4 h32 q6000 d64 bf16 causal packed", 0, marks=NEWER),
        pytest.param("attn b8 h16 q4096 d192 dv128 bf16 causal packed", 0, marks=pytest.mark.one_triton),
        pytest.param("attn b8 h16 q4096 d160 bf16 causal packed page64", 8, marks=REDUNDANT),
        ("attn b2 h16 q512 k513 d96 bf16 causal", 0),
        *(
            pytest.param(f"attn b2 h16 {sizes} {width} bf16{mask}", 40 if width == "d160" else 16, marks=REDUNDANT)
            for width in ("d40", "d72", "d80", "d96", "d160", "d192", "d192 dv160", "d136")
            for sizes, mask in (("q4096", ""), ("q4096", " causal"), ("q1000 k3001", " causal"))
        ),
        ("attn b4 h16 q4097 d128 bf16 causal", 0),
        *(
            pytest.param(f"attn {sizes} bf16", 0, marks=REDUNDANT)
            for sizes in ("b34 h24 q908 d128", "b2 h32 hk4 q5656 k7948 d72", "b1 h28 q6684 d80", "b4 h21 q3420 d96")
        ),
        pytest.param("attn b1 h10 q14766 k15802 d96 bf16 causal", 0, marks=REDUNDANT),
        pytest.param("attn b55 h16 q577 d96 bf16 causal", 0, marks=REDUNDANT),
        pytest.param("attn b1 h28 q6684 d80 bf16 causal", 0, marks=REDUNDANT),
        pytest.param("attn b2 h16 q4096 d96 bf16 causal softcap50", 8, marks=(*REDUNDANT, NEWER)),
        pytest.param("attn b2 h16 q4096 d256 bf16 causal softcap50", 56, marks=REDUNDANT),
        pytest.param("attn b2 h16 q1000 k3001 d128 bf16 causal softcap50", 40, marks=REDUNDANT),
        ("attn b2 h16 q2048 d64 bf16 bias", 0),
        pytest.param("attn b2 h16 q2048 d64 bf16 boolmask", 0, marks=REDUNDANT),
        pytest.param("attn b2 h16 q1000 k3001 d128 bf16 bias", SPILLS_OF_ODD_BIAS, marks=REDUNDANT),
        pytest.param("attn b1 h64 hk8 q4096 d64 bf16 causal sinks", 0, marks=REDUNDANT),
    ],
)
def test_builds_fit(text: str, spills: int, built: Callable[..., Build]) -> None:
    one, gpu = parse(text), gpu_named("h200")
    config = host.fitted(one, one, host.configs(one, gpu)[0], gpu)
    build = built(compile_jobs(kernel.KERNEL, one, config, gpu)[0], gpu, kernel.NAME, one, config)
    assert fits(build, gpu) is None
    assert build.spill_bytes <= spills
    by_one = one.features.bias == "additive" and one.seqlen_k % 2  # such a bias is not exchanged by way of shared memory
    tiles = host.tile_bytes(one, dict(config)) - (config["consumers"] * host.EXCHANGE_BYTES if by_one else 0)
    assert 0 <= build.shared_dynamic - tiles <= 2048


@pytest.mark.parametrize("width", ["d40", "d192"])
def test_the_mark_that_says_where_v_is_is_looked_for_at_a_whole_kib(width: str, compiled: Callable[..., Any]) -> None:
    """Only there is one; and a barrier stands between the marks and the look."""
    one, gpu = parse(f"attn b2 h16 q4096 {width} bf16"), gpu_named("h200")
    config = host.configs(one, gpu)[0]
    found = compiled(compile_jobs(kernel.KERNEL, one, config, gpu)[0], gpu, kernel.NAME, one, config)
    before, _, after = found.asm["ptx"].rpartition("%dynamic_smem_size;")
    assert before
    look = re.search(r"ld\.shared\.b32\s+%r\d+, \[global_smem(?:\+(\d+))?\];", after)
    assert look is not None
    assert int(look[1] or 0) % 1024 == 0
    assert re.search(r"bar\.sync\s+0, 128;", after[: look.start()])
