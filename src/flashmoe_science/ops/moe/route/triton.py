"""The router of ``route.py`` in Triton: one launch, a few tokens a warp, each choice two reductions in registers.

Scores are compared as int32 keys in the order of the fp32 numbers. -inf and NaN have keys of their own below every number and
above those of experts already chosen: K different experts are chosen whatever the logits are.
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
from flashmoe_science.ops.moe.route.spec import Options, RouteLaunch, Tensors

MAX_EXPERTS = 4096
_EXCLUDED = tl.constexpr(-(2**31))  # below every key: of an expert that is chosen or padding, or whose group is not
_NAN = tl.constexpr(1 - 2**31)


@triton.jit
def _key(score):
    """int32 in the order of the fp32 scores; the zeros are one, NaN comes last. Sign and magnitude to two's complement."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(score == score, tl.where(bits < 0, -magnitude, magnitude), _NAN)


@triton.jit
def _score(key):
    """The fp32 score that ``_key`` made the key of."""
    bits = tl.where(key < 0, -key | -(2**31), key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _best(keys, places, AXIS: tl.constexpr):
    """The largest key along the last axis and its place, the lowest of equals.

    Two reductions of plain integers: a warp does each in one instruction (redux.sync), which it cannot for pairs.
    """
    best = tl.max(keys, AXIS)
    return best, tl.min(tl.where(keys == tl.expand_dims(best, AXIS), places, 2**31 - 1), AXIS)


@triton.jit
def _keys_of_best_groups(
    keys, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_K_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The keys, those excluded that are not in the groups of the largest sums of their two best scores."""
    SIZE: tl.constexpr = E // GROUPS
    grouped = tl.reshape(keys, [BLOCK_T, GROUPS, SIZE])
    members = tl.arange(0, SIZE)[None, None, :]  # [1, 1, SIZE]
    groups = tl.arange(0, GROUPS)[None, :]  # [1, GROUPS]
    first, member = _best(grouped, members, 2)  # [BLOCK_T, GROUPS]
    total = _score(first) if BIASED else _sigmoid(_score(first))
    if SIZE > 1:
        second = tl.max(tl.where(members == tl.expand_dims(member, 2), _EXCLUDED, grouped), 2)
        total += _score(second) if BIASED else _sigmoid(_score(second))
    group_keys = _key(total)  # [BLOCK_T, GROUPS]
    for _ in range(TOP_K_GROUPS):
        _, group = _best(group_keys, groups, 1)
        group_keys = tl.where(groups == group[:, None], _EXCLUDED, group_keys)
    return tl.reshape(tl.where(tl.expand_dims(group_keys, 2) == _EXCLUDED, grouped, _EXCLUDED), [BLOCK_T, E])


@triton.jit(do_not_specialize=("tokens",))
def flashmoe_moe_route(
    logits_base, bias_base, weights_base, ids_base, stride_t, tokens, scaling_factor,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    GROUPS: tl.constexpr, TOP_K_GROUPS: tl.constexpr, SCORING: tl.constexpr, BIASED: tl.constexpr, SUM_TO_ONE: tl.constexpr,
    BLOCK_T: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """The router of ``BLOCK_T`` tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    experts, places = tl.arange(0, E_PAD)[None, :], tl.arange(0, K_PAD)[None, :]  # [1, E_PAD], [1, K_PAD]
    row = logits_base + token * stride_t
    if EARLY_START:
        gdc_launch_dependents()  # those wait for all of this kernel before they touch memory
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
    x = tl.load(row + experts, mask=(token < tokens) & (experts < E), other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        row_max = tl.max(x, 1)[:, None]  # [BLOCK_T, 1]
        row_sum = tl.sum(tl.exp(x - row_max), 1)[:, None]
    # Without a bias the score rises with the logit, whose fp32 value is exact where a score is rounded.
    if BIASED:
        keys = _key(_sigmoid(x) + tl.load(bias_base + experts, mask=experts < E, other=0.0))  # [BLOCK_T, E_PAD]
    else:
        keys = _key(x)
    if E < E_PAD:
        keys = tl.where(experts < E, keys, _EXCLUDED)
    if GROUPS > 1:
        keys = _keys_of_best_groups(keys, BIASED, GROUPS, TOP_K_GROUPS, BLOCK_T, E)

    ids = tl.zeros([BLOCK_T, K_PAD], tl.int32)
    for place in range(K):
        _, expert = _best(keys, experts, 1)  # [BLOCK_T]
        keys = tl.where(experts == expert[:, None], _EXCLUDED, keys)
        ids = tl.where(places == place, expert[:, None], ids)

    chosen = (token < tokens) & (places < K)
    # Read again, from the first-level cache: to pick them out of the registers would be a reduction for each.
    logit = tl.load(row + ids, mask=chosen, other=float("-inf")).to(tl.float32)  # [BLOCK_T, K_PAD]
    if SCORING == "sigmoid":
        weight = _sigmoid(logit)
    else:
        if SCORING == "softmax_topk":
            row_max = tl.max(logit, 1)[:, None]
            row_sum = tl.sum(tl.exp(logit - row_max), 1)[:, None]
        weight = tl.exp(logit - row_max) / row_sum
    if SUM_TO_ONE:
        weight = weight / (tl.sum(tl.where(places < K, weight, 0.0), 1)[:, None] + 1e-20)
    tl.store(weights_base + token * K + places, weight * scaling_factor, mask=chosen)
    tl.store(ids_base + token * K + places, ids, mask=chosen)


def cannot(options: Options, experts: int) -> str | None:
    """Why the kernel cannot serve logits of that number of experts, in words; None where it can."""
    if experts > MAX_EXPERTS:
        return f"it has {experts} experts; the kernel takes at most {MAX_EXPERTS}"
    if options.groups > 1 and (experts & (experts - 1) or options.groups & (options.groups - 1)):
        return f"it has {experts} experts in {options.groups} groups; the kernel takes powers of two"
    return None


def bind(like: Tensors, options: Options) -> RouteLaunch:
    """call(logits, bias) -> (top_k_weights, top_k_ids) for checked tensors of these shapes, strides, dtypes and alignments."""
    (logits, bias), experts = like, like.router_logits.shape[-1]
    (rows, in_place), dense_bias = rows_of(logits), bias is None or bias.is_contiguous()
    tokens, stride = rows.shape[0], rows.stride(0)
    constexprs = _constexprs(options, experts, bias is not None, not INTERPRETING and can_start_early(logits.device))
    guard = device_guard(logits.get_device())
    build = guard(_build)(rows, bias if bias is None else bias.contiguous(), stride, constexprs)
    grid = (cdiv(tokens, constexprs["BLOCK_T"]), 1, 1)
    launch = build.bound(grid, stride, tokens, options.scaling_factor, *constexprs.values())
    shape, empty = (*logits.shape[:-1], options.top_k), allocator(logits.is_cuda)
    of_weights, of_ids = contiguous(shape, torch.float32), contiguous(shape, torch.int32)

    def call(logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = empty(*of_weights), empty(*of_ids)
        if tokens == 0:
            return weights, ids
        rows = logits if in_place else logits.contiguous()
        dense = bias if bias is None or dense_bias else bias.contiguous()
        launch(address(rows), argument(dense), address(weights), address(ids))
        return weights, ids

    return guard(call)


def rows_of(logits: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Logits as [tokens, experts], and whether a kernel reads them in place; else they are a copy, contiguous."""
    experts = logits.shape[-1]
    rows = logits.reshape(-1, experts)
    in_place = rows.data_ptr() == logits.data_ptr() and (rows.stride(1) == 1 or experts == 1)
    return rows if in_place else logits.contiguous().view(-1, experts), in_place


def _build(rows: torch.Tensor, bias: torch.Tensor | None, stride: int, constexprs: dict[str, Any]) -> Build:
    """The kernel compiled for the current device, kept for all calls that it serves."""
    addresses = (rows.data_ptr() % 16, 0 if bias is None else bias.data_ptr() % 16)
    key = (rows.device, rows.dtype, addresses, stride_class((stride,)), *constexprs.values())
    pointers = (stand_in(rows), stand_in(bias), Pointer(torch.float32), Pointer(torch.int32))
    options = {"num_warps": tile_of(constexprs["E_PAD"])[1], "launch_pdl": constexprs["EARLY_START"]}
    return kept_build(key, flashmoe_moe_route, (*pointers, stride, 1, 0.5, *constexprs.values()), **options)


def _constexprs(o: Options, experts: int, biased: bool, early_start: bool) -> dict[str, Any]:
    padded = next_power_of_2(experts)
    return {
        "E": experts, "E_PAD": padded, "K": o.top_k, "K_PAD": next_power_of_2(o.top_k),
        "GROUPS": o.groups, "TOP_K_GROUPS": o.top_k_groups, "SCORING": o.scoring, "BIASED": biased,
        "SUM_TO_ONE": o.normalize == "sum", "BLOCK_T": tile_of(padded)[0], "EARLY_START": early_start,
    }  # fmt: skip


def tile_of(padded_experts: int) -> tuple[int, int]:
    """(tokens, warps) of a program: each row is in the registers of one warp, whose reductions are then one instruction each.

    Triton spreads a row over several warps where it is longer than they load at once (128 fp32), so longer rows have one warp,
    unless they would not fit its registers.
    """
    if padded_experts <= 128:
        return max(4, 128 // padded_experts), 4
    return max(1, 512 // padded_experts), 1 if padded_experts <= 1024 else 4


def why_no_router(problem: MoEProblem) -> str | None:
    """Why a problem that starts from logits cannot be routed here, in words; None where it can."""
    if problem.routing == "ids":
        return None
    reason = cannot(Options(problem.top_k), problem.experts)
    return None if reason is None else f"experts is {problem.experts}; the router takes at most {MAX_EXPERTS}"


def launches_of(problem: MoEProblem) -> tuple[Launch, ...]:
    """The launches of a problem's router, before its experts: none where the problem starts from ids."""
    if problem.routing == "ids":
        return ()
    tokens, warps = tile_of(next_power_of_2(problem.experts))
    return (Launch(f"^{flashmoe_moe_route.__name__}$", (cdiv(problem.tokens, tokens), 1, 1), 32 * warps),)


def routing_bytes(problem: MoEProblem) -> int:
    """Device memory that the router of a problem takes: the ids and weights that it chooses."""
    return 0 if problem.routing == "ids" else 8 * problem.pairs()
