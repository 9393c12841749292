"""Experts' gradients that PyTorch's grouped product refuses, or that no kernel of ours has: by PyTorch, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.ops.moe.front.test_backward import LEAVES, F, H, arguments, leaves
from torch.autograd import forward_ad

import flashmoe_science as fm
from flashmoe_science.kernel import CannotServe


def columns_apart(one: torch.Tensor) -> torch.Tensor:
    return one.repeat_interleave(4, -1)[..., ::4]


def the_first_row(one: torch.Tensor) -> torch.Tensor:
    return one[..., :1, :].expand_as(one)


def the_first_column(one: torch.Tensor) -> torch.Tensor:
    return one[..., :1].expand_as(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dim", "hidden", "laid_out"),
    [(1, 1, None), (1, 8, None), (8, 1, None), (H, F, columns_apart), (H, F, the_first_row), (H, F, the_first_column)],
)
def test_what_pytorchs_grouped_product_refuses_is_served(
    dim: int, hidden: int, laid_out: Callable[[torch.Tensor], torch.Tensor] | None, dtype: torch.dtype
) -> None:
    """Widths of 1, and strides that are neither of rows nor of columns."""
    given = {name: one if name == "top_k_ids" else one.to(dtype) for name, one in arguments(dim=dim, hidden=hidden).items()}
    if laid_out is not None:
        given |= {name: laid_out(given[name]) for name in ("hidden_states", "gate_up_proj", "down_proj")}
    found = []
    for of in (dtype, torch.float64):
        inputs = {name: one if name == "top_k_ids" else one.detach().to(of) for name, one in given.items()}
        out = fm.fused_moe(**inputs | dict(zip(LEAVES, of_call := leaves(inputs), strict=False)))
        found.append([out, *torch.autograd.grad(out.square().sum(), of_call)])
    for got, right in zip(*found, strict=True):
        assert (got.double() - right).norm() <= (2**-6 if dtype == torch.bfloat16 else 1e-5) * right.norm()


def in_forward_mode(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The derivative along ones."""

    def derivative(x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            made: torch.Tensor = forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
            return made

    return derivative


@pytest.mark.parametrize("transform", [in_forward_mode, torch.func.grad], ids=["forward mode", "torch.func"])
def test_a_transform_is_served_by_pytorch_and_by_no_kernel_that_is_named(transform: Any) -> None:
    given = arguments()
    x = given.pop("hidden_states")

    def experts(x: torch.Tensor, kernel: str | None = None) -> torch.Tensor:
        return fm.fused_moe(x, **given, kernel=kernel).sum()

    right = transform(experts)(x)
    for name in ("grouped_mm", "grouped_mm_bwd"):
        assert torch.equal(transform(partial(experts, kernel=name))(x), right)
    for name in ("moe_bwd_triton", "moe_grouped_triton"):
        with pytest.raises(CannotServe, match=f"'{name}' cannot serve this call: .* of torch.func; 'grouped_mm' can"):
            transform(partial(experts, kernel=name))(x)
    with pytest.raises(ValueError, match="kernel is 'nothing'; it must be one of moe_"):
        transform(partial(experts, kernel="nothing"))(x)


def by_autograd(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.autograd.grad(function(x.requires_grad_()), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "hidden"), [(16, 5), (20, 8), (16, 8)])
@pytest.mark.parametrize("derivative", [by_autograd, torch.func.grad, in_forward_mode])
def test_gradients_that_pytorchs_grouped_product_lacks(
    derivative: Callable[..., Any], dim: int, hidden: int, dtype: torch.dtype
) -> None:
    """PyTorch takes gradients whose rows are a multiple of 16 bytes apart, and has none in forward mode."""
    given = {name: one if name == "top_k_ids" else one.to(dtype) for name, one in arguments(dim=dim, hidden=hidden).items()}
    wide = {name: one if name == "top_k_ids" else one.double() for name, one in given.items()}
    got, right = (
        derivative(lambda x, of=of: fm.fused_moe(**of | {"hidden_states": x}, kernel="grouped_mm").sum())(of["hidden_states"])
        for of in (given, wide)
    )
    assert (got.double() - right).norm() <= (2**-6 if dtype == torch.bfloat16 else 1e-5) * right.norm()
