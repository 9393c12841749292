"""The launches of experts with low-rank adapters build for Hopper; the products' loops are those without adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.compile.moe_backward import problem_of

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.hardware.target import Build, fits
from flashmoe_science.operations import operation
from flashmoe_science.ops.launch import collect_builds
from flashmoe_science.ops.moe.adapted import backward, forward
from flashmoe_science.ops.moe.backward.gluon_sm90 import config as of_backward
from flashmoe_science.ops.moe.call.adapters import LowRank
from flashmoe_science.ops.moe.call.backward import BackwardInputs, BackwardTensors, backward_problem_of
from flashmoe_science.ops.moe.products.gluon_sm90 import config as of_forward

GPU = GPUS["h200"]
QWEN, UNEVEN = ("t4096 e128 k8 d2048 f768 bf16", (16, 16)), ("t700 e16 k3 d520 f200 fp16 gelu", (72, 128))
PRODUCTS = {"up": 256, "down": 256, "dhidden": 128}  # columns of a tile
BESIDE = tuple(f"flashmoe_moe_{name}" for name in ("lowrank", "lowrank_sum", "dweights", "dweights"))


def builds_of(text: str, ranks: tuple[int, int]) -> list[tuple[Any, ...]]:
    """What builds the products of both passes, those of the low-rank sides, and the gradients of both adapters."""
    problem, contract = problem_of(text), operation("moe").contract()
    with collect_builds(GPU) as jobs:
        given = contract.for_kernel(problem, contract.inputs(problem, torch.device("meta"), torch.Generator()))
        given, t = replace(given, saves_z=True), given.tensors
        first, second = (
            LowRank(t.x.new_empty(w.shape[0], rank, w.shape[2]), t.x.new_empty(*w.shape[:2], rank), 0.5)
            for w, rank in zip((t.w1, t.w2), ranks, strict=True)
        )
        forward.plan(given, (first, second), of_forward.configs(problem, GPU)[0])(given)
        z = t.x.new_empty(problem.pairs(), t.w1.shape[1])
        tensors = BackwardTensors(*t, z, torch.empty_like(t.x))
        inputs = BackwardInputs(backward_problem_of(problem), tensors, given.activation)
        backward.plan(inputs, (first, second), of_backward.configs(problem, GPU)[0])(inputs)
    kept = [job for job in jobs if job.function.__name__ in BESIDE or job.function.__name__.endswith("gluon_sm90")]
    return [(job, GPU, "moe_adapted_gluon_sm90", problem, f"{number}: ranks {ranks}") for number, job in enumerate(kept)]


@pytest.mark.parametrize("call", [pytest.param(QWEN, marks=pytest.mark.one_triton), UNEVEN], ids=lambda call: call[0])
def test_all_products_build_without_spills_and_fit(
    call: tuple[str, tuple[int, int]], built: Callable[..., Build], compiled: Callable[..., Any]
) -> None:
    found: list[str] = []
    for one in builds_of(*call):
        build, ptx = built(*one), compiled(*one).asm["ptx"]
        found.append(build.kernel)
        assert (build.refusal, build.spill_bytes, fits(build, GPU)) == (None, 0, None), build.kernel
        product = build.kernel.removeprefix("flashmoe_moe_").removesuffix("_gluon_sm90")
        if product in PRODUCTS:  # one loop of two consumers for both parts of the depth
            assert build.registers == 168
            assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n{PRODUCTS[product]}k16") == 2 * 4, product
        elif product != "lowrank_sum":
            assert "wgmma" in ptx, product
    gluon = [f"flashmoe_moe_{name}_gluon_sm90" for name in ("up", "down", "dhidden", "down")]
    assert sorted(found) == sorted([*gluon, *2 * BESIDE])
