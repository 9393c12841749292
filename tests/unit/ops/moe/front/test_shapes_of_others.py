"""Shapes and routings that SonicMoE's, Liger's and torchtitan's tests train experts with, against the fp64 oracle.

An error may be twice that of the same maths done plainly in the dtype, and a few roundings of the largest element.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.unit.interpreter import Interpreter

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.kernel import CannotServe
from flashmoe_science.operations import operation
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.proof.backward.oracle import gradients_oracle, gradients_plain
from flashmoe_science.ops.moe.proof.oracle import moe_oracle, moe_plain


class Shape(NamedTuple):
    """Tokens, experts, the model's width, an expert's width, experts a token."""

    t: int
    e: int
    h: int
    i: int
    k: int


LIGER = (
    Shape(7, 4, 64, 32, 2),  # fewer tokens than a tile has rows
    Shape(512, 8, 256, 128, 2),
    Shape(512, 8, 97, 47, 2),  # widths that no tile divides
    Shape(512, 7, 128, 64, 3),
    Shape(512, 8, 256, 64, 1),
    Shape(128, 8, 256, 64, 8),  # every token to every expert
    Shape(32, 8, 64, 32, 2),
    Shape(1, 4, 32, 16, 2),
    Shape(16, 4, 32, 16, 4),
)
INTERPRETED = (*(one for one in LIGER if one.t < 100), Shape(40, 8, 97, 47, 2))
SONIC = tuple(Shape(8192, e, h, i, k) for h, i, e, k in (
    (768, 256, 128, 8), (768, 512, 64, 4), (768, 1024, 32, 2), (1536, 512, 64, 4), (4096, 256, 256, 16), (4096, 1024, 64, 4),
))  # fmt: skip
SMALL_SONIC = tuple(Shape(96, one.e, one.h // 16, one.i // 16, one.k) for one in SONIC)


def uniform(shape: Shape) -> torch.Tensor:
    return torch.randn(shape.t, shape.e)


def skewed(shape: Shape) -> torch.Tensor:
    """The first experts have most."""
    return torch.randn(shape.t, shape.e) - 3.0 * torch.arange(1, shape.e + 1).log()


def empty(shape: Shape) -> torch.Tensor:
    """As few experts as a token has, every third of them all, are chosen."""
    chosen = torch.zeros(shape.e, dtype=torch.bool)
    chosen[::3] = True
    chosen[: shape.k] |= chosen.sum() < shape.k
    return torch.randn(shape.t, shape.e).masked_fill(~chosen, -1e4)


ROUTINGS: dict[str, Callable[[Shape], torch.Tensor]] = {"uniform": uniform, "skewed": skewed, "empty": empty}
ALL = [*ROUTINGS, "one"]
REDUNDANT = (pytest.mark.slow, pytest.mark.redundant)  # a mistake of rows or ids shows in fp32 too
KERNELS = ("grouped_mm_bwd", *(kernel.name for kernel in operation("moe_backward").ours()))


def call_of(shape: Shape, routing: str, dtype: torch.dtype, scale: float, device: str) -> tuple[Tensors, torch.Tensor]:
    """The call and the gradient into its result. ``scale``: of x and of the weights."""
    torch.manual_seed(0)
    x, w1, w2, dout = (
        (factor * torch.randn(size)).to(device, dtype)
        for factor, size in (
            (scale, (shape.t, shape.h)), (0.02, (shape.e, 2 * shape.i, shape.h)), (0.02, (shape.e, shape.h, shape.i)),
            (scale, (shape.t, shape.h)),
        )
    )  # fmt: skip
    if routing == "one":  # Liger's: each of a token's choices is the first expert
        return Tensors(x, w1, w2, *_constant(shape, device)), dout
    weights, ids = ROUTINGS[routing](shape).softmax(-1).topk(shape.k)
    return Tensors(x, w1, w2, (weights / weights.sum(-1, keepdim=True)).to(device), ids.to(device)), dout


def _constant(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(shape.t, shape.k, dtype=torch.int32, device=device)
    return torch.full(ids.shape, 1 / shape.k, device=device), ids


def put(shape: Shape, routing: str, dtype: torch.dtype, scale: float, device: str, kernel: str) -> None:
    tensors, dout = call_of(shape, routing, dtype, scale, device)
    leaves = [one.requires_grad_() for one in tensors[:4]]
    out = fm.fused_moe(*tensors[:5], kernel=kernel)
    got = out, *torch.autograd.grad(out, leaves, dout)
    given = Tensors(*(one if one is None else one.detach() for one in tensors))
    silu = Activation()
    right = moe_oracle(given, silu), *gradients_oracle(given, silu, dout)
    plain = moe_plain(given, silu), *gradients_plain(given, silu, dout)
    for name, one, exact, naive in zip(("out", "dx", "dw1", "dw2", "dweights"), got, right, plain, strict=True):
        allowed = 2 * (naive.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (one.double() - exact).abs().max() <= allowed, name
    used = torch.zeros(shape.e, dtype=torch.bool)
    used[tensors.topk_ids.cpu().unique()] = True
    for of_weights in got[2:4]:
        assert torch.equal(of_weights.cpu().flatten(1).any(1), used)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=REDUNDANT)])
@pytest.mark.parametrize("routing", ALL)
@pytest.mark.parametrize("shape", LIGER + SMALL_SONIC, ids=lambda shape: "x".join(map(str, shape)))
def test_pytorchs_operators_are_right(shape: Shape, routing: str, dtype: torch.dtype) -> None:
    put(shape, routing, dtype, 1.0, "cpu", "grouped_mm_bwd")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ALL)
@pytest.mark.parametrize("shape", LIGER, ids=lambda shape: "x".join(map(str, shape)))
def test_ligers_on_a_gpu(shape: Shape, routing: str, dtype: torch.dtype, kernel: str) -> None:
    try:
        put(shape, routing, dtype, 1.0, "cuda", kernel)
    except CannotServe as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("shape", INTERPRETED, ids=lambda shape: "x".join(map(str, shape)))
def test_ligers_in_tritons_interpreter(shape: Shape, interpreted: Interpreter) -> None:
    assert interpreted("ops/moe/front/test_shapes_of_others.py", *map(str, shape)) == ALL


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("shape", SONIC, ids=lambda shape: "x".join(map(str, shape)))
def test_sonicmoes_on_a_gpu(shape: Shape, routing: str, kernel: str) -> None:
    put(shape, routing, torch.bfloat16, 0.02, "cuda", kernel)


COUNTS = ((16, 16, 16, 16), (3, 0, 0, 61), (0, 0, 64, 0), (0, 1, 0, 30), (64, 0, 0, 0), (0, 0, 0, 0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_torchtitans_experts_by_counts_of_rows(counts: tuple[int, ...], device: str) -> None:
    """w1, w3 and w2 apart, rows that its dispatcher sorted, those past the last expert's filled up."""
    torch.manual_seed(0)
    experts, dim, hidden, rows = len(counts), 32, 48, 64
    x = torch.randn(rows, dim)
    w1, w3 = (torch.randn(experts, hidden, dim) * dim**-0.5 for _ in range(2))
    given = [one.to(device).requires_grad_() for one in (x, w1, w3, torch.randn(experts, dim, hidden) * hidden**-0.5)]
    x, w1, w3, w2 = given
    offsets = torch.tensor(counts, device=device).cumsum(0)
    out = fm.grouped_moe(x, (w1, w3), w2, offsets)
    wide = [one.detach().double().requires_grad_() for one in given]
    pieces = wide[0].split([*counts, rows - sum(counts)])
    right = torch.cat([
        *((torch.nn.functional.silu(piece @ one.T) * (piece @ three.T)) @ two.T
          for piece, one, three, two in zip(pieces, *wide[1:], strict=False)),
        torch.zeros_like(pieces[-1]),
    ])  # fmt: skip
    into = torch.randn(rows, dim, device=device)
    made = torch.autograd.grad(out, given, into)
    exact = torch.autograd.grad(right, wide, into.double(), allow_unused=True, materialize_grads=True)
    for got, want in zip((out, *made), (right, *exact), strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    for of_weights in made[1:]:
        assert of_weights.flatten(1).any(1).tolist() == [count > 0 for count in counts]


if __name__ == "__main__":
    with assume(gpu_named("a100")):
        for name in ALL:
            put(Shape(*map(int, sys.argv[1:])), name, torch.float32, 1.0, "cpu", "moe_bwd_triton")
    print(json.dumps(ALL))
