"""Mixture of experts with weights in a format for a token or a few, in Gluon: two products by mma.sync, without sorting.

Shapes: x [T, H], w1 [E, 2I, H] (or [E, I, H]) and w2 [E, H, I] in a format (``ops/formats.py``); weights and ids [T, K] ->
out [T, H]. bf16, of int4 and fp8 channels fp16 too; T to 8; sums in fp32; sm_80 to sm_90, w8a8 on Hopper.

The chosen experts' weights are all there is to read. Tokens are the columns of a product, eight of an instruction whether they
are there or not; weights are its rows, and become its operand in the registers that they were loaded into, 16 bytes a thread
(``operands.py``). A program of the first product has a few rows of one expert, whose depth its warps share, and stores the
rows of the tokens that chose it. One of the second has a few rows of all of the experts that tokens chose, a warp an expert or
a part of its depth: its sum in a fixed order is the result. It reads its first weights while the first product ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.gluon_bridge import as_gluon
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.call import Bind, MoEInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.gemv_gluon.launch import NAME, configs, grids, plan_both, suits, supports, workspace
from flashmoe_science.ops.moe.products.gemv_gluon.operands import TOKENS, numbers, places_layout, result_layout, spread
from flashmoe_science.ops.moe.products.gemv_gluon.product import NONE, multiply, of_channels, read, rows_of, steps_of
from flashmoe_science.ops.moe.route.triton import launches_of

_activated = as_gluon(activated)


@gluon.jit
def _experts_of(ids, token, place, tokens, TOP_K: gl.constexpr, EXPERTS: gl.constexpr):
    """The experts that tokens chose, NONE for none."""
    expert = gl.load(ids + token * TOP_K + place, mask=(token < tokens) & (place < TOP_K), other=-1)
    return gl.where((expert >= 0) & (expert < EXPERTS), expert, NONE).to(gl.int32)


@gluon.jit
def _pairs_of(
    ids, expert, tokens, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, PLACES: gl.constexpr, PARTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The first pair [parts, 8] of each token that has an expert [parts, 1, 1], NONE for none. NONE has none."""
    layout: gl.constexpr = places_layout(WARPS, PARTS, PLACES, False)
    place = numbers(PLACES, 2, layout, 3)
    token = numbers(TOKENS, 1, layout, 3)
    chosen = (_experts_of(ids, token, place, tokens, TOP_K, EXPERTS) == expert) & (expert != NONE)
    return gl.min(gl.where(chosen, token * TOP_K + place, NONE), 2)


@gluon.jit
def _rows_of(pairs, BY: gl.constexpr):
    """The rows of pairs, one for ``BY`` pairs. Those that are none have the row of another one, which is read anyway."""
    least = gl.min(pairs, 1)
    least = gl.expand_dims(gl.where(least == NONE, 0, least), 1)
    return gl.where(pairs == NONE, least, pairs) // BY


@gluon.jit(do_not_specialize=["tokens"])
def flashmoe_moe_gemv_up_gluon(
    x, w, scale, zero_point, input_scale, bias, ids, out, tokens,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_X: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr,
    FUNCTION: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    SCALES: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
    EARLY_START: gl.constexpr,
):  # fmt: skip
    """out[pair, n] = act(x[token] . w[expert, gate n], x[token] . w[expert, up n]) of every first pair of a token and an
    expert."""
    # What the second product reads before it waits was there before this kernel began.
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()
    pair = gl.program_id(0) % (tokens * TOP_K)
    chosen = gl.load(ids + pair)
    if (chosen >= 0) & (chosen < EXPERTS):
        expert = chosen.to(gl.int32)
        pairs = _pairs_of(ids, expert, tokens, TOP_K, EXPERTS, PLACES, 1, WARPS)
        if gl.min(gl.min(pairs, 1), 0) == pair:  # one program has all tokens of an expert
            _up(
                x, w, scale, zero_point, input_scale, bias, out, expert, pairs, gl.program_id(0) // (tokens * TOP_K),
                TOP_K, DEPTH, WIDTH, STRIDE_X, STRIDE_E, STRIDE_N, FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT,
                SCALES, ROWS, STEPS, WARPS,
            )  # fmt: skip


@gluon.jit
def _up(
    x, w, scale, zero_point, input_scale, bias, out, expert, pairs, block,
    TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_X: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr,
    FUNCTION: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    SCALES: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    RESULTS: gl.constexpr = ROWS // 2 if GATED else ROWS
    UPS: gl.constexpr = WIDTH if GATED and not INTERLEAVED else 0
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, result_layout(WARPS))))
    column = block * RESULTS
    rows = rows_of(
        w, scale, zero_point, warp * 0 + expert, warp >= 0, warp, column,
        WIDTH, UPS, INTERLEAVED, STRIDE_E, STRIDE_N, SCALES, ROWS, WARPS,
    )  # fmt: skip
    of_input = None
    if input_scale is not None:
        of_input = gl.load(input_scale + (warp * 0 + expert) * SCALES[8]).to(gl.float32)
    at = _rows_of(pairs, TOP_K)
    CHUNKS: gl.constexpr = (DEPTH + 127) // 128
    EACH: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS  # chunks of a warp
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, result_layout(WARPS))
    for part in gl.static_range((EACH + STEPS - 1) // STEPS):
        held = read(rows, part * STEPS, steps_of(part, STEPS, EACH), DEPTH, SCALES, ROWS, WARPS, WARPS)
        acc = multiply(
            acc, held, rows, x, at, of_input, part * STEPS, steps_of(part, STEPS, EACH),
            DEPTH, SCALES, ROWS, WARPS, WARPS, STRIDE_X, x.dtype.element_ty,
        )  # fmt: skip
    acc = of_channels(acc, rows, of_input, SCALES, WARPS)
    stored: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [0, 1])
    nth = numbers(RESULTS, 0, stored, 2)
    inside = column + nth < WIDTH
    both = gl.sum(acc, 0)  # [ROWS, 8]
    if GATED:
        both = both.reshape([ROWS // 16, 2, 8, TOKENS]).permute(0, 2, 3, 1)
        gate, up = both.split()
        gate = gl.convert_layout(gate.reshape([RESULTS, TOKENS]), stored)
        up = gl.convert_layout(up.reshape([RESULTS, TOKENS]), stored)
    else:
        gate = gl.convert_layout(both, stored)
        up = gate
    if bias is not None:
        of_gate = expert * (2 * WIDTH if GATED else WIDTH) + (2 * (column + nth) if INTERLEAVED else column + nth)
        gate += gl.load(bias + of_gate, mask=inside, other=0.0).to(gl.float32)
        if GATED:
            of_up = of_gate + 1 if INTERLEAVED else of_gate + WIDTH
            up += gl.load(bias + of_up, mask=inside, other=0.0).to(gl.float32)
    active = _activated(gate, up, FUNCTION, GATED, ALPHA, LIMIT)
    row = gl.expand_dims(gl.convert_layout(gl.max(pairs, 0), gl.SliceLayout(0, stored)), 0)
    gl.store(out + row.to(gl.int64) * WIDTH + (column + nth), active.to(out.dtype.element_ty), mask=inside & (row != NONE))


@gluon.jit
def _next_experts(experts, last, SIDE: gl.constexpr, WARPS: gl.constexpr):
    """Those that follow the ``last``: of each warp its expert, the first of them, the last of them; NONE for none."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, result_layout(WARPS)))
    warp = gl.arange(0, WARPS, layout)
    expert = gl.full([WARPS], NONE, gl.int32, layout)
    begin = last
    for nth in gl.static_range(SIDE):
        last = gl.min(gl.min(gl.min(gl.where(experts > last, experts, NONE), 2), 1), 0)
        expert = gl.where(warp // (WARPS // SIDE) == nth, last, expert)
        if nth == 0:
            begin = last
    return expert, begin, last


@gluon.jit(do_not_specialize=["tokens"])
def flashmoe_moe_gemv_down_gluon(
    a, w, scale, zero_point, input_scale, bias, ids, weights, out, tokens,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr, TOP_K: gl.constexpr,
    SCALES: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
    SIDE: gl.constexpr, ONCE: gl.constexpr, EARLY_START: gl.constexpr,
):  # fmt: skip
    """out[token, n] = the sum over the token's experts of weight times (a[pair] . w[expert, n] + bias). Experts come in their
    order, ``SIDE`` at a time; ``ONCE``: there are no more."""
    first = gl.program_id(0) * ROWS
    layout: gl.constexpr = places_layout(WARPS, 1, PLACES, False)
    place = numbers(PLACES, 2, layout, 3)
    token = numbers(TOKENS, 1, layout, 3)
    experts = _experts_of(ids, token, place, tokens, TOP_K, EXPERTS)
    total = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, result_layout(WARPS))
    expert, begin, last = _next_experts(experts, -1, SIDE, WARPS)
    if ONCE:
        total = _add(
            total, a, w, scale, zero_point, input_scale, ids, weights, tokens, expert, first, EXPERTS, DEPTH, WIDTH,
            STRIDE_E, STRIDE_N, TOP_K, SCALES, PLACES, ROWS, STEPS, WARPS, SIDE, out.dtype.element_ty, EARLY_START,
        )  # fmt: skip
    else:
        while begin != NONE:
            total = _add(
                total, a, w, scale, zero_point, input_scale, ids, weights, tokens, expert, first, EXPERTS, DEPTH, WIDTH,
                STRIDE_E, STRIDE_N, TOP_K, SCALES, PLACES, ROWS, STEPS, WARPS, SIDE, out.dtype.element_ty, EARLY_START,
            )  # fmt: skip
            expert, begin, last = _next_experts(experts, last, SIDE, WARPS)
        if EARLY_START:
            gdc_wait()  # also where there was no expert: who waits for this kernel waits for the one before it
    if EARLY_START:
        gdc_launch_dependents()
    stored: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [0, 1])
    row = first + numbers(ROWS, 0, stored, 2)
    token = numbers(TOKENS, 1, stored, 2)
    result = gl.convert_layout(gl.sum(total, 0), stored)
    if bias is not None:
        for place in gl.static_range(TOP_K):
            expert = _experts_of(ids, token, place, tokens, TOP_K, EXPERTS)
            here = (expert != NONE) & (row < WIDTH)
            added = gl.load(bias + expert.to(gl.int64) * WIDTH + row, mask=here, other=0.0).to(gl.float32)
            weight = gl.load(weights + token * TOP_K + place, mask=expert != NONE, other=0.0).to(gl.float32)
            result += gl.where(here, weight * added, 0.0)
    gl.store(out + token * WIDTH + row, result.to(out.dtype.element_ty), mask=(token < tokens) & (row < WIDTH))


@gluon.jit
def _add(
    total, a, w, scale, zero_point, input_scale, ids, weights, tokens, expert, first,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr,
    TOP_K: gl.constexpr, SCALES: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr,
    WARPS: gl.constexpr, SIDE: gl.constexpr, DTYPE: gl.constexpr, EARLY_START: gl.constexpr,
):  # fmt: skip
    """The sums, and those of each warp's expert times the weights that tokens chose it with."""
    BY: gl.constexpr = WARPS // SIDE
    result: gl.constexpr = result_layout(WARPS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, result)))
    here = expert != NONE
    rows = rows_of(
        w, scale, zero_point, gl.where(here, expert, 0), here, warp % BY, first,
        WIDTH, 0, False, STRIDE_E, STRIDE_N, SCALES, ROWS, WARPS,
    )  # fmt: skip
    of_input = None
    if input_scale is not None:
        of_input = gl.load(input_scale + gl.where(here, expert, 0) * SCALES[8]).to(gl.float32)
    CHUNKS: gl.constexpr = (DEPTH + 127) // 128
    EACH: gl.constexpr = (CHUNKS + BY - 1) // BY
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, result_layout(WARPS))
    at = ()
    for part in gl.static_range((EACH + STEPS - 1) // STEPS):
        held = read(rows, part * STEPS, steps_of(part, STEPS, EACH), DEPTH, SCALES, ROWS, BY, WARPS)
        if part == 0:
            one = spread(expert, 0, places_layout(WARPS, WARPS, PLACES, False), 3)
            at = _rows_of(_pairs_of(ids, one, tokens, TOP_K, EXPERTS, PLACES, WARPS, WARPS), 1)
            if EARLY_START:
                gdc_wait()
        acc = multiply(
            acc, held, rows, a, at, of_input, part * STEPS, steps_of(part, STEPS, EACH),
            DEPTH, SCALES, ROWS, BY, WARPS, DEPTH, DTYPE,
        )  # fmt: skip
    acc = of_channels(acc, rows, of_input, SCALES, WARPS)
    by_column: gl.constexpr = places_layout(WARPS, WARPS, PLACES, True)
    place = numbers(PLACES, 2, by_column, 3)
    one = spread(expert, 0, by_column, 3)
    token = numbers(TOKENS, 1, by_column, 3)
    chosen = (_experts_of(ids, token, place, tokens, TOP_K, EXPERTS) == one) & (one != NONE)
    weight = gl.load(weights + token * TOP_K + place, mask=chosen, other=0.0).to(gl.float32)
    weight = gl.convert_layout(gl.sum(weight, 2), gl.SliceLayout(1, result), assert_trivial=True)
    chosen = gl.convert_layout(gl.max(chosen.to(gl.int32), 2), gl.SliceLayout(1, result), assert_trivial=True)
    # 0 times what a token that did not choose the expert has is not 0 where that is not finite.
    return total + gl.where(gl.expand_dims(chosen, 1) > 0, acc * gl.expand_dims(weight, 1), 0.0)


def plan(inputs: MoEInputs, config: Config) -> Bind:
    return plan_both(inputs, config, flashmoe_moe_gemv_up_gluon, flashmoe_moe_gemv_down_gluon)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    up, down = grids(problem, config)
    return (
        *launches_of(problem),
        Launch(f"^{flashmoe_moe_gemv_up_gluon.__name__}$", up, 32 * config["up_warps"]),
        Launch(f"^{flashmoe_moe_gemv_down_gluon.__name__}$", down, 32 * config["down_warps"]),
    )


KERNEL = our_kernel(
    name=NAME,
    about="Gluon for a few tokens and weights in a format, which go from memory straight into tensor cores' operand",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
)
