"""The router's losses in Triton, of logits and of the ids that were chosen: two launches, sums in a fixed order.

Up to ``_PROGRAMS`` programs sum over tokens, in registers; one adds up their sums. What the backward needs is the load of the
experts; it computes the softmax again (``backward_triton.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.calls import device_guard
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Pointer,
    address,
    allocator,
    can_start_early,
    cdiv,
    kept_build,
    next_power_of_2,
    stand_in,
    stride_class,
    workspace_allocator,
)
from flashmoe_science.ops.moe.call import contiguous
from flashmoe_science.ops.moe.route.spec import LossesLaunch, RouterSums
from flashmoe_science.ops.moe.route.triton import rows_of

_PROGRAMS = 256
_ELEMENTS, _WARPS = 1024, 8  # of a program that sums over tokens: logits at once
_ELEMENTS_OF_ALL, _WARPS_OF_ALL = 8192, 8  # of the one that adds up


@triton.jit(do_not_specialize=("tokens",))
def flashmoe_moe_losses(
    logits_base, ids_base, sums_base, loads_base, stride_t, tokens,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Of each program's tokens: the sums of every expert's probability, then that of the squared log-sum-exps, and the number
    of times that every expert was chosen."""
    experts = tl.arange(0, E_PAD)[None, :]  # [1, E_PAD]
    probability = tl.zeros([BLOCK_T, E_PAD], tl.float32)
    load = tl.zeros([BLOCK_T, E_PAD], tl.int32)
    square = tl.zeros([BLOCK_T, 1], tl.float32)
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        token = tl.cast(block, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
        x = tl.load(logits_base + token * stride_t + experts, mask=(token < tokens) & (experts < E), other=float("-inf"))
        x = x.to(tl.float32)
        largest = tl.max(x, 1)[:, None]
        exponential = tl.exp(x - largest)
        total = tl.sum(exponential, 1)[:, None]
        lse = largest + tl.log(total)
        probability += tl.where(token < tokens, exponential / total, 0.0)
        square += tl.where(token < tokens, lse * lse, 0.0)
        for place in range(K):
            expert = tl.load(ids_base + token * K + place, mask=token < tokens, other=-1)  # [BLOCK_T, 1]
            load += (experts == expert).to(tl.int32)
    sums, loads = sums_base + tl.program_id(0) * (E + 1), loads_base + tl.program_id(0) * E
    expert = tl.arange(0, E_PAD)
    tl.store(sums + expert, tl.sum(probability, 0), mask=expert < E)
    tl.store(sums + E, tl.sum(tl.sum(square, 1), 0))
    tl.store(loads + expert, tl.sum(load, 0), mask=expert < E)


@triton.jit(do_not_specialize=("tokens", "programs"))
def flashmoe_moe_losses_of_all(
    sums_base, loads_base, balance_base, z_base, load_base, tokens, programs,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_P: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Both losses and the experts' load, of the sums of all programs; 0 without tokens."""
    experts = tl.arange(0, E_PAD)[None, :]  # [1, E_PAD]
    probability = tl.zeros([BLOCK_P, E_PAD], tl.float32)
    load = tl.zeros([BLOCK_P, E_PAD], tl.int32)
    square = tl.zeros([BLOCK_P, 1], tl.float32)
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)[:, None]  # [BLOCK_P, 1]
        inside = (program < programs) & (experts < E)
        probability += tl.load(sums_base + program * (E + 1) + experts, mask=inside, other=0.0)
        square += tl.load(sums_base + program * (E + 1) + E, mask=program < programs, other=0.0)
        load += tl.load(loads_base + program * E + experts, mask=inside, other=0)
    expert, divisor = tl.arange(0, E_PAD), tl.maximum(tokens, 1).to(tl.float32)
    of_all = tl.sum(load, 0)  # [E_PAD]
    tl.store(load_base + expert, of_all, mask=expert < E)
    tl.store(balance_base, E * tl.sum(of_all.to(tl.float32) / divisor * (tl.sum(probability, 0) / divisor), 0))
    tl.store(z_base, tl.sum(tl.sum(square, 1), 0) / divisor)


def bind(logits: torch.Tensor, ids: torch.Tensor) -> LossesLaunch:
    """call(logits, ids) -> ``RouterSums``, for tensors of these shapes, strides, dtypes and alignments."""
    (rows, in_place), experts, top_k = rows_of(logits), logits.shape[-1], ids.shape[-1]
    tokens, stride, padded = rows.shape[0], rows.stride(0), next_power_of_2(experts)
    block, block_of_all = max(1, _ELEMENTS // padded), max(1, _ELEMENTS_OF_ALL // padded)
    programs = max(1, min(_PROGRAMS, cdiv(tokens, block)))
    early = not INTERPRETING and can_start_early(logits.device)
    values, of_all = (experts, padded, top_k, block, early), (experts, padded, block_of_all, early)
    guard = device_guard(logits.get_device())

    def launches() -> tuple[Any, Any]:
        single, integer = Pointer(torch.float32), Pointer(torch.int32)
        key = (rows.device, rows.dtype, rows.data_ptr() % 16, stride_class((stride,)), *values)
        pointers = stand_in(rows), Pointer(ids.dtype), single, integer
        first = kept_build(key, flashmoe_moe_losses, (*pointers, stride, 1, *values), num_warps=_WARPS, launch_pdl=early)
        given = single, integer, single, single, integer, 1, 1, *of_all
        last = kept_build((rows.device, *of_all), flashmoe_moe_losses_of_all, given, num_warps=_WARPS_OF_ALL, launch_pdl=early)
        return first.bound((programs, 1, 1), stride, tokens, *values), last.bound((1, 1, 1), tokens, programs, *of_all)

    first, last = guard(launches)()
    empty = allocator(logits.is_cuda)
    scalar, of_load = contiguous((), torch.float32), contiguous((experts,), torch.int32)
    take = workspace_allocator(logits.is_cuda, ((programs * (experts + 1), torch.float32), (programs * experts, torch.int32)))

    def call(logits: torch.Tensor, ids: torch.Tensor) -> RouterSums:
        found = RouterSums(empty(*scalar), empty(*scalar), empty(*of_load))
        _held, *parts = take()
        first(address(logits if in_place else logits.contiguous()), address(ids), *parts)
        last(*parts, *map(address, found))
        return found

    return guard(call)
