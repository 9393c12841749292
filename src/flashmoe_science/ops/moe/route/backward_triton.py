"""The router's gradient in Triton: one launch, a few tokens a warp, each row of logits in registers.

With y the softmax over the chosen experts (over all where weights are not divided by their sum) and g the gradient of their
weights, a logit's is y (g - <g, y>); of a sigmoid s it is g' s (1 - s), where g' is g or, of weights that are divided by their
sum S, (g - <g, s> / S) / S. Logits of other experts have 0, or -y <g, y> of a softmax over all.

The losses add, of p the softmax over all E experts, T tokens and the gradients b and z of the losses:
p (b E (load - <load, p>) / T^2 + 2 z lse / T).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.kernel import Launch
from flashmoe_science.ops.calls import device_guard
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Build,
    Pointer,
    address,
    allocator,
    argument,
    can_start_early,
    cdiv,
    kept_build,
    next_power_of_2,
    stand_in,
    stride_class,
)
from flashmoe_science.ops.moe.call import contiguous
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.route.spec import Options, RouteGradient
from flashmoe_science.ops.moe.route.triton import rows_of, tile_of


@triton.jit
def _softmax(x, counted):
    """The softmax of each row over what is counted, 0 elsewhere, and the rows' log-sum-exps."""
    x = tl.where(counted, x, float("-inf"))
    largest = tl.max(x, 1)[:, None]
    exponential = tl.where(counted, tl.exp(x - largest), 0.0)
    total = tl.sum(exponential, 1)[:, None]
    return exponential / total, largest + tl.log(total)


@triton.jit(do_not_specialize=("tokens",))
def flashmoe_moe_droute(
    logits_base, ids_base, dweights_base, dbalance_base, dz_base, load_base, out_base, stride_t, tokens, scaling_factor,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, SUM_TO_ONE: tl.constexpr,
    BLOCK_T: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of ``BLOCK_T`` tokens; those of the losses too where there is a load of the experts."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    experts = tl.arange(0, E_PAD)[None, :]  # [1, E_PAD]
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    inside = (token < tokens) & (experts < E)  # [BLOCK_T, E_PAD]
    x = tl.load(logits_base + token * stride_t + experts, mask=inside, other=float("-inf")).to(tl.float32)
    gradient = tl.zeros([BLOCK_T, E_PAD], tl.float32)  # of the weights of the chosen, by expert
    chosen = gradient != 0.0
    for place in range(K):
        expert = tl.load(ids_base + token * K + place, mask=token < tokens, other=-1)  # [BLOCK_T, 1]
        of_weight = tl.load(dweights_base + token * K + place, mask=token < tokens, other=0.0).to(tl.float32)
        gradient = tl.where(experts == expert, of_weight, gradient)
        chosen = chosen | (experts == expert)
    if SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-x))
        if SUM_TO_ONE:
            total = tl.sum(tl.where(chosen, score, 0.0), 1)[:, None] + 1e-20
            gradient = (gradient - tl.sum(tl.where(chosen, gradient * score, 0.0), 1)[:, None] / total) / total
        out = tl.where(chosen, gradient * score * (1.0 - score), 0.0)
    else:
        ALL: tl.constexpr = SCORING == "softmax" and not SUM_TO_ONE
        counted = inside if ALL else chosen
        weight, _ = _softmax(x, counted)
        mean = tl.sum(tl.where(chosen, gradient * weight, 0.0), 1)[:, None]
        out = tl.where(counted, weight * (gradient - mean), 0.0)
    to = out_base + token * E + experts
    out *= scaling_factor
    if load_base is not None:
        weight, lse = _softmax(x, inside)
        load = tl.load(load_base + experts, mask=experts < E, other=0).to(tl.float32) / tokens  # [1, E_PAD]
        of_balance = tl.load(dbalance_base) * E / tokens
        of_lse = tl.load(dz_base) * 2.0 * lse / tokens  # [BLOCK_T, 1]
        out += weight * (of_balance * (load - tl.sum(weight * load, 1)[:, None]) + of_lse)
    tl.store(to, out.to(out_base.dtype.element_ty), mask=inside)


def bind(
    options: Options, logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor, *of_losses: torch.Tensor
) -> RouteGradient:
    """call(logits, ids, dweights, *of_losses) -> the gradient of logits, contiguous, for tensors of these shapes, strides and
    dtypes. ``of_losses``: dbalance, dz and the experts' load, or none."""
    experts, shape = logits.shape[-1], logits.shape
    rows, in_place = rows_of(logits)
    tokens, stride = rows.shape[0], rows.stride(0)
    padded = next_power_of_2(experts)
    block, warps = tile_of(padded)
    early = not INTERPRETING and can_start_early(logits.device)
    values = (experts, padded, options.top_k, options.scoring, options.normalize == "sum", block, early)
    guard = device_guard(logits.get_device())
    build = guard(_build)(rows, (ids, dweights, *_three(of_losses)), stride, values, warps)
    launch = build.bound((cdiv(tokens, block), 1, 1), stride, tokens, options.scaling_factor, *values)
    empty, result = allocator(logits.is_cuda), contiguous(shape, logits.dtype)

    def call(logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor, *of_losses: torch.Tensor) -> torch.Tensor:
        out = empty(*result)
        if tokens:
            rows, more = logits if in_place else logits.contiguous(), map(argument, _three(of_losses))
            launch(address(rows), address(ids.contiguous()), address(dweights.contiguous()), *more, address(out))
        return out

    return guard(call)


def _three(of_losses: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    return of_losses or (None, None, None)


def _build(
    rows: torch.Tensor, more: tuple[torch.Tensor | None, ...], stride: int, values: tuple[Any, ...], warps: int
) -> Build:
    """The kernel compiled for the current device, kept for all calls that it serves."""
    dtypes = tuple([None if one is None else one.dtype for one in more])
    key = (rows.device, rows.dtype, dtypes, rows.data_ptr() % 16, stride_class((stride,)), *values)
    pointers = (stand_in(rows), *(None if one is None else Pointer(one) for one in dtypes), Pointer(rows.dtype))
    arguments = (*pointers, stride, 1, 0.5, *values)
    return kept_build(key, flashmoe_moe_droute, arguments, num_warps=warps, launch_pdl=bool(values[-1]))


def launches_of(problem: MoEProblem) -> tuple[Launch, ...]:
    """The launches of a problem's router after its experts' backward: none where the problem starts from ids."""
    if problem.routing == "ids":
        return ()
    tokens, warps = tile_of(next_power_of_2(problem.experts))
    return (Launch(f"^{flashmoe_moe_droute.__name__}$", (cdiv(problem.tokens, tokens), 1, 1), 32 * warps),)
