"""What is launched around a kernel builds, fits and spills nothing: merges, tiles, planes, sorts, products, sums, appends."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.operations import kernel_named, parse_problem
from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.device import append_triton
from flashmoe_science.ops.launch import collect_builds

H200 = GPUS["h200"]
AROUND = {
    ("split_triton", "attn b1 h32 hk8 q1 k8192 d128 bf16"): ["merge_triton"],  # one warp a program
    ("split_triton", "attn b16 h32 hk8 q1 k32768 d128 bf16 bshd ragged"): ["merge_triton"],  # four, and stream-K
    ("chunk_gluon_sm90", "attn b1 h32 hk8 q16 k8192 d128 fp16 causal bshd packed"): ["chunk_merge"],
    ("fwd_gluon_sm90", "attn b1 h32 hk8 q16 k8192 d128 fp16 causal bshd packed"): ["packed_tiles_triton"],
    ("fp32_gluon_sm90", "attn b2 h16 q4096 d64 fp32 causal"): ["fp32_planes"],
    ("moe_gemv_triton", "moe t1 e128 k8 d2048 f768 bf16"): ["moe_gemv_down"],
    ("moe_grouped_triton", "moe t1 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"): [
        "moe_down",
        "moe_combine",
        "moe_rows",
    ],
    ("moe_grouped_triton", "moe t64 e128 k8 d2048 f768 bf16 w:fp8_block"): ["moe_down", "moe_combine", "moe_rows"],
    ("moe_grouped_triton", "moe t64 e128 k8 d2048 f768 bf16 w:fp8_channel"): ["moe_down", "moe_combine", "moe_rows"],
    ("moe_grouped_triton", "moe t1 e128 k8 d2048 f768 bf16 w:int4_g128"): ["moe_down", "moe_combine", "moe_rows"],
    ("moe_grouped_triton", "moe t1 e128 k8 d2048 f768 bf16 w:int4_g128_zero"): ["moe_down", "moe_combine", "moe_rows"],
    ("moe_grouped_triton", "moe t1024 e128 k8 d2048 f768 fp16"): ["moe_down", "moe_combine", "moe_rows", "moe_count"],
}


@pytest.mark.parametrize(("kernel", "text"), AROUND)
def test_it_builds_and_fits(kernel: str, text: str, built: Callable[..., Build]) -> None:
    one, problem = kernel_named(kernel), parse_problem(text)
    config = one.configs(problem, H200)[0]
    _, *jobs = compile_jobs(one, problem, config, H200)
    assert [job.function.__name__ for job in jobs] == [f"flashmoe_{name}" for name in AROUND[kernel, text]]
    for job in jobs:
        build = built(job, H200, kernel, problem, config)
        assert (fits(build, H200), build.spill_bytes) == (None, 0)
        (promise,) = [launch for launch in one.launches(problem, config, H200) if re.search(launch.name, build.kernel)]
        assert build.threads == promise.threads


@pytest.mark.parametrize("paged", [False, True])
def test_an_append_builds_and_fits(paged: bool, built: Callable[..., Build]) -> None:
    def rows(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    integers = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((8,), (8, 256))]
    cache = rows(2048, 16, 8, 128) if paged else rows(8, 4096, 8, 128)
    tables = [torch.empty(4096, 64, dtype=torch.bfloat16, device="meta")] * 2 if paged else [None, None]
    new = Append(cache, cache, rows(8, 4, 8, 128), rows(8, 4, 8, 128), rows(8, 4, 32, 128), integers[0])
    new = new._replace(page_table=integers[1] if paged else None, rotary_cos=tables[0], rotary_sin=tables[1])
    with collect_builds(H200) as jobs:
        append_triton.bind(new)
    build = built(*jobs, H200, "append", "d128 bf16 page16 rotary" if paged else "d128 bf16", "")
    assert (fits(build, H200), build.spill_bytes, build.kernel) == (None, 0, "flashmoe_append_triton")
