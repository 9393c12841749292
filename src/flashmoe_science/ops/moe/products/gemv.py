"""Mixture of experts for a token or a few: matrix-vector products, in two launches, without sorting and without tensor cores.

Shapes as in ``triton.py``. The chosen experts' weights are all there is to read, so a program takes a few rows of one
matrix and streams them: first of one pair's expert, then, for one token, of all of its experts at once, whose sum in a fixed
order is the result. fp16, bf16 and fp32, sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.launch import Build, Grid, Pointer, address, allocator, cdiv, next_power_of_2, stand_in
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.call import (
    Bind,
    MoEInputs,
    MoELaunch,
    Shape,
    check_sums_alone,
    contiguous,
    our_kernel,
    run_of,
    why_no_format,
)
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.grouped import down_constexprs, starts_early, up_constexprs
from flashmoe_science.ops.moe.route.triton import launches_of, routing_bytes, why_no_router
from flashmoe_science.problem import DTYPE_BYTES

NAME = "moe_gemv_triton"
MAX_TOKENS = 8
UNROLLED = 4  # steps whose loads are under way at once


@triton.jit(do_not_specialize=["pairs"])
def flashmoe_moe_gemv_up(
    x, w, bias, ids, out, pairs,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[pair, n] = act(x[token] . w[expert, gate n], x[token] . w[expert, up n]); nothing for a pair without an expert."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    # Programs that follow each other take the same rows, each of another pair: an expert of several is read once, then from L2.
    pair = (tl.program_id(0) % pairs).to(tl.int64)
    block = tl.program_id(0) // pairs
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert >= 0) & (expert < EXPERTS):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # A gate and its up that alternate are read together and split at the end; else the up is WIDTH rows further.
        both: tl.constexpr = GATED and INTERLEAVED
        if both:
            rows = block * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)  # [2 BLOCK_N]
        else:
            rows = columns
        ROWS: tl.constexpr = 2 * WIDTH if both else WIDTH
        depth = tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x_ptrs = x + pair // TOP_K * STRIDE_X + depth
        # [BLOCK_N, BLOCK_K], as gate and up
        w_ptrs = w + expert * STRIDE_E + rows.to(tl.int64)[:, None] * STRIDE_N + depth.to(tl.int64)[None, :] * STRIDE_K
        gate = tl.zeros([rows.shape[0], BLOCK_K], tl.float32)
        up = tl.zeros([rows.shape[0], BLOCK_K], tl.float32)
        for k in tl.range(0, DEPTH, BLOCK_K, loop_unroll_factor=UNROLL):
            inside = (rows < ROWS)[:, None] & (k + depth < DEPTH)[None, :]
            a = tl.load(x_ptrs, mask=k + depth < DEPTH, other=0.0).to(tl.float32)[None, :]
            gate += a * tl.load(w_ptrs, mask=inside, other=0.0).to(tl.float32)
            if GATED and not INTERLEAVED:
                up += a * tl.load(w_ptrs + WIDTH * STRIDE_N, mask=inside, other=0.0).to(tl.float32)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * STRIDE_K
        gate, up = tl.sum(gate, 1), tl.sum(up, 1)  # as rows
        if bias is not None:
            biases: tl.constexpr = 2 * WIDTH if GATED else WIDTH
            bias_ptrs = bias + expert * biases + rows
            gate += tl.load(bias_ptrs, mask=rows < ROWS, other=0.0).to(tl.float32)
            if GATED and not INTERLEAVED:
                up += tl.load(bias_ptrs + WIDTH, mask=rows < ROWS, other=0.0).to(tl.float32)
        if both:
            gate, up = tl.split(tl.reshape(gate, [BLOCK_N, 2]))
        active = activated(gate, up, FUNCTION, GATED, ALPHA, LIMIT)
        tl.store(out + pair * WIDTH + columns, active.to(out.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def flashmoe_moe_gemv_down(
    a_base, w, bias, ids, weights, out, tokens,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[token, n] = the sum over the token's experts of weight times (a[pair] . w[expert, n] + bias)."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) % tokens).to(tl.int64)
    place = tl.arange(0, PLACES)  # [PLACES]
    pair = token * TOP_K + place
    expert = tl.load(ids + pair, mask=place < TOP_K, other=-1).to(tl.int64)  # [PLACES]
    present = (expert >= 0) & (expert < EXPERTS)
    weight = tl.where(present, tl.load(weights + pair, mask=place < TOP_K, other=0.0).to(tl.float32), 0.0)
    columns = tl.program_id(0) // tokens * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    depth = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    a_ptrs = a_base + (pair * DEPTH)[:, None] + depth[None, :]  # [PLACES, BLOCK_K]
    w_ptrs = w + (expert * STRIDE_E)[:, None, None] + columns.to(tl.int64)[None, :, None] * STRIDE_N
    w_ptrs += depth.to(tl.int64)[None, None, :] * STRIDE_K  # [PLACES, BLOCK_N, BLOCK_K]
    written = present[:, None, None] & (columns < WIDTH)[None, :, None]
    acc = tl.zeros([PLACES, BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.range(0, DEPTH, BLOCK_K, loop_unroll_factor=UNROLL):
        a = tl.load(a_ptrs, mask=present[:, None] & (k + depth < DEPTH)[None, :], other=0.0).to(tl.float32)
        b = tl.load(w_ptrs, mask=written & (k + depth < DEPTH)[None, None, :], other=0.0).to(tl.float32)
        acc += a[:, None, :] * b
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * STRIDE_K
    result = tl.sum(acc, 2)  # [PLACES, BLOCK_N]
    if bias is not None:
        bias_ptrs = bias + (expert * WIDTH)[:, None] + columns[None, :]
        result += tl.load(bias_ptrs, mask=present[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)
    # 0 times what a place without an expert has is not 0 where that is not finite.
    summed = tl.sum(tl.where(present[:, None], result * weight[:, None], 0.0), 0)  # [BLOCK_N]
    tl.store(out + token * WIDTH + columns, summed.to(out.dtype.element_ty), mask=columns < WIDTH)


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_triton(device) or why_no_format(problem):
        return reason
    if problem.tokens > MAX_TOKENS:
        return f"tokens is {problem.tokens}; it is for at most {MAX_TOKENS}"
    if problem.top_k > 64:
        return f"top_k is {problem.top_k}; it takes at most 64"
    if problem.transposed:  # 136 us where the grouped kernel takes 61 (gpt-oss, one token)
        return "weights are transposed ([experts, in, out] in memory); it reads the depth of a row"
    return why_no_router(problem)


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Rows of weights, columns of one step and warps, of the first product and of the second, the best guess first. ``down_k``
    counts the columns of all experts of a token together."""
    shapes = [(2, 1024, 4, 1, 512, 1), (4, 512, 4, 1, 1024, 2), (2, 512, 4, 2, 1024, 2), (8, 512, 4, 4, 2048, 4)]
    names = ("up_n", "up_k", "up_warps", "down_n", "down_k", "down_warps")
    return tuple(Config(**dict(zip(names, shape, strict=True))) for shape in shapes)


def suits(problem: MoEProblem, gpu: Gpu) -> bool:
    """Above a few tokens experts are shared by tokens, and tensor cores are ahead."""
    return problem.tokens <= 4


def _block(most: int, width: int) -> int:
    return min(most, max(16, next_power_of_2(width)))


def plan(inputs: MoEInputs, config: Config) -> Bind:
    check_sums_alone(inputs)
    p, (x, w1, w2, weights, ids, gate_up_bias, down_bias, *_) = inputs.problem, inputs.tensors
    early, new, places = starts_early(x), Pointer(x.dtype), next_power_of_2(p.top_k)
    up_tile = config["up_n"], _block(config["up_k"], p.dim), UNROLLED, early
    up = (*up_constexprs(inputs).values(), *up_tile)
    of_up = (*map(stand_in, (x, w1, gate_up_bias, ids)), new, 2, *up)
    build_up = Build(flashmoe_moe_gemv_up, of_up, num_warps=config["up_warps"], launch_pdl=early)
    down_tile = config["down_n"], _block(max(16, config["down_k"] // places), p.hidden), UNROLLED, early
    down = (*down_constexprs(inputs).values(), p.top_k, places, *down_tile)
    of_down = (new, *map(stand_in, (w2, down_bias, ids, weights)), new, 2, *down)
    build_down = Build(flashmoe_moe_gemv_down, of_down, num_warps=config["down_warps"], launch_pdl=early)

    def bind(like: MoEInputs, shape: Shape) -> MoELaunch:
        p, like_x = like.problem, like.tensors.x
        allocate, grids = allocator(like_x.is_cuda), _grids(p, config)
        launch_up, launch_down = build_up.bound(grids[0], p.pairs(), *up), build_down.bound(grids[1], p.tokens, *down)
        of_active, result = ((p.pairs(), p.hidden), (p.hidden, 1), like_x.dtype), contiguous(shape, like_x.dtype)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, *of_weights: None,
        ) -> torch.Tensor:  # fmt: skip
            active, out = allocate(*of_active), allocate(*result)
            rows, chosen = address(active), address(ids)
            launch_up(address(x), address(w1), None if gate_up_bias is None else address(gate_up_bias), chosen, rows)
            bias = None if down_bias is None else address(down_bias)
            launch_down(rows, address(w2), bias, chosen, address(weights), address(out))
            return out

        return call

    return bind


def _grids(problem: MoEProblem, config: Config) -> tuple[Grid, Grid]:
    up_n, down_n = config["up_n"], config["down_n"]
    return (cdiv(problem.hidden, up_n) * problem.pairs(), 1, 1), (cdiv(problem.dim, down_n) * problem.tokens, 1, 1)


def workspace(problem: MoEProblem, config: Config) -> int:
    """Bytes of the rows between the products, and of what a router before them chose."""
    return problem.pairs() * problem.hidden * DTYPE_BYTES[problem.dtype] + routing_bytes(problem)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    up, down = _grids(problem, config)
    return (
        *launches_of(problem),
        Launch(f"^{flashmoe_moe_gemv_up.__name__}$", up, 32 * config["up_warps"]),
        Launch(f"^{flashmoe_moe_gemv_down.__name__}$", down, 32 * config["down_warps"]),
    )


KERNEL = our_kernel(
    name=NAME,
    about="Triton for a few tokens: two matrix-vector products that stream the chosen experts' weights",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
    interpretable=True,
)
