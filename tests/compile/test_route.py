"""The router's kernels build for Hopper and newer, spill nothing, and reduce a row by single instructions of its warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, build_residency, fits
from flashmoe_science.ops.launch import collect_builds
from flashmoe_science.ops.moe.route import backward_triton, losses_triton
from flashmoe_science.ops.moe.route.spec import Options, Tensors
from flashmoe_science.ops.moe.route.triton import MAX_EXPERTS, bind

ROUTERS = {  # options, experts, biased
    "mixtral": (Options(2, "softmax", "sum"), 8, False),
    "qwen3": (Options(8, "softmax", "sum"), 128, False),
    "gpt-oss": (Options(4, "softmax_topk"), 32, False),
    "deepseek-v3": (Options(8, "sigmoid", "sum", 8, 4, 2.5), 256, True),
    "deepseek-v3 without a bias": (Options(8, "sigmoid", "sum", 8, 4, 2.5), 256, False),
    "kimi-k2": (Options(8, "sigmoid", "sum", 1, 1, 2.827), 384, True),
    "one expert": (Options(1, "softmax"), 1, False),
    "all of 512": (Options(512, "softmax"), 512, False),
    "most experts": (Options(8, "sigmoid", "sum"), MAX_EXPERTS, True),
}


def named(router: str, dtype: str, gpu: str) -> tuple[Any, ...]:
    """What builds a router."""
    options, experts, biased = ROUTERS[router]
    logits = torch.empty(4, experts, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device="meta")
    with collect_builds(GPUS[gpu]) as jobs:
        bind(Tensors(logits, torch.empty(experts, device="meta") if biased else None), options)
    return *jobs, GPUS[gpu], "route", router, dtype


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("gpu", "dtype"), [("h200", "bf16"), pytest.param("b200", "fp32", marks=pytest.mark.one_triton)])
def test_it_builds_without_spills(router: str, dtype: str, gpu: str, built: Callable[..., Build]) -> None:
    job, *names = named(router, dtype, gpu)
    build = built(job, *names)
    assert (build.kernel, build.refusal, build.spill_bytes) == ("flashmoe_moe_route", None, 0)
    assert fits(build, GPUS[gpu]) is None
    assert build_residency(build, GPUS[gpu]).warps >= 16


def backward_named(router: str, dtype: str, gpu: str, losses: bool) -> tuple[Any, ...]:
    """What builds a router's gradient."""
    options, experts, _ = ROUTERS[router]
    logits = torch.empty(4, experts, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device="meta")
    dweights = torch.empty(4, options.top_k, device="meta")
    with collect_builds(GPUS[gpu]) as jobs:
        scalar, load = torch.empty((), device="meta"), torch.empty(experts, dtype=torch.int32, device="meta")
        of_losses = (scalar, scalar, load) if losses else ()
        backward_triton.bind(options, logits, dweights.int(), dweights, *of_losses)
    return *jobs, GPUS[gpu], "route", f"{router}{' with losses' if losses else ''}", dtype


@pytest.mark.parametrize("router", ["mixtral", "qwen3", "gpt-oss", "deepseek-v3", "all of 512"])
@pytest.mark.parametrize(("gpu", "dtype"), [("h200", "fp32"), pytest.param("a100", "bf16", marks=pytest.mark.one_triton)])
def test_its_gradient_builds_without_spills(router: str, dtype: str, gpu: str, built: Callable[..., Build]) -> None:
    for losses in (False, True):
        job, *names = backward_named(router, dtype, gpu, losses)
        build = built(job, *names)
        assert (build.kernel, build.refusal, build.spill_bytes) == ("flashmoe_moe_droute", None, 0)
        assert fits(build, GPUS[gpu]) is None
        assert build_residency(build, GPUS[gpu]).warps >= 16


@pytest.mark.parametrize("router", ["mixtral", "qwen3", "all of 512", "most experts"])
@pytest.mark.parametrize(("gpu", "dtype"), [("h200", "fp32"), pytest.param("a100", "bf16", marks=pytest.mark.one_triton)])
def test_its_losses_build_without_spills(router: str, dtype: str, gpu: str, built: Callable[..., Build]) -> None:
    options, experts, _ = ROUTERS[router]
    logits = torch.empty(4, experts, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device="meta")
    with collect_builds(GPUS[gpu]) as jobs:
        losses_triton.bind(logits, torch.empty(4, options.top_k, dtype=torch.int32, device="meta"))
    builds = [built(job, GPUS[gpu], "route", router, dtype) for job in jobs]
    assert [one.kernel for one in builds] == ["flashmoe_moe_losses", "flashmoe_moe_losses_of_all"]
    for build in builds:
        assert (build.refusal, build.spill_bytes) == (None, 0)
        assert fits(build, GPUS[gpu]) is None
    assert build_residency(builds[0], GPUS[gpu]).warps >= 16


@pytest.mark.parametrize(
    ("router", "dtype"), [("qwen3", "bf16"), ("gpt-oss", "fp32"), ("deepseek-v3", "fp32"), ("kimi-k2", "bf16")]
)
def test_a_choice_is_two_instructions_of_one_warp(router: str, dtype: str, compiled: Callable[..., Any]) -> None:
    ptx = compiled(*named(router, dtype, "h200")).asm["ptx"]
    assert ptx.count("redux.sync.max.s32") == ptx.count("redux.sync.min.s32") >= 1
    assert ptx.count("bar.sync") <= 3  # results change their layout once; no choice waits for other warps
