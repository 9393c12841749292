"""The launches of moe_fp8_gluon_sm90: its products built for inputs like these, and all launches of a call around them."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.descriptors import template
from flashmoe_science.ops.launch import Build, Pointer, address, allocator, argument, stand_in, workspace_allocator
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import Bind, MoEInputs, MoELaunch, Shape, contiguous
from flashmoe_science.ops.moe.products.fp8_sm90 import quantize
from flashmoe_science.ops.moe.products.fp8_sm90.config import (
    AT_LAUNCH,
    CONSUMER_REGISTERS,
    FLAGS,
    PRODUCER_REGISTERS,
    parts,
    ups,
)
from flashmoe_science.ops.moe.products.fp8_sm90.consumer import HALF
from flashmoe_science.ops.moe.products.fp8_sm90.memory import STEP
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.products.stream_k_launch import Product, Tile, bound
from flashmoe_science.ops.moe.rows import RowCounts

# Products launch(a, w, out, scales of a, of w, of out, input scale of what is activated, partial, flags, tables)


def up(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The first product. Its w1 is a [experts, gates and ups, hidden, dim] view."""
    p, a, (_, w1, *_), static = inputs.problem, inputs.activation, inputs.tensors, inputs.tensors.down_input_scale
    of_expert, of_row, _ = w1.stride()
    shape, strides = (p.experts, 2, p.hidden, p.dim), (of_expert, p.hidden * of_row, of_row, 1)
    tile = (1, 2, HALF.value, STEP.value), shape, strides
    constexprs = {
        "EXPERTS": p.experts, "DEPTH": p.dim, "WIDTH": p.hidden, **_strides(inputs.tensors.gate_up_scale, 2),
        "UPS": ups(inputs), "STRIDE_S": 0 if static is None else static.stride(0),
        "FUNCTION": a.function, "ALPHA": a.alpha, "LIMIT": a.limit,
    }  # fmt: skip
    return _product(function, inputs, config, tile, inputs.tensors.gate_up_scale, static, "e4m3", constexprs)


def down(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The second product."""
    p, w2 = inputs.problem, inputs.tensors.w2
    tile = (1, 2 * HALF.value, STEP.value), (p.experts, p.dim, p.hidden), w2.stride()
    constexprs = {"EXPERTS": p.experts, "DEPTH": p.hidden, "WIDTH": p.dim, **_strides(inputs.tensors.down_scale)}
    return _product(function, inputs, config, tile, inputs.tensors.down_scale, None, "bf16", constexprs)


def _strides(scale: torch.Tensor | None, matrices: int = 1) -> dict[str, int | None]:
    """Strides of scales of blocks, and of those of rows or of whole matrices, of which so many are one tensor."""
    assert scale is not None
    of_expert, of_row, *of_column = scale.stride()
    if not of_column and scale.shape[1] <= matrices:
        of_row = 0
    return {"STRIDE_E": of_expert, "STRIDE_N": of_row, "STRIDE_K": of_column[0] if of_column else None}


def _product(
    function: Any,
    inputs: MoEInputs,
    config: Config,
    tile: Tile,
    scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    result: str,
    constexprs: dict[str, Any],
) -> Product:
    """One of the two products, built."""
    x, tokens, depth, width = inputs.tensors.x, config["block_m"], constexprs["DEPTH"], constexprs["WIDTH"]
    gpu, early = current_gpu(x.device), starts_early(x)
    assert gpu is not None
    values = *constexprs.values(), config["group"], config["num_stages"], CONSUMER_REGISTERS, PRODUCER_REGISTERS
    a, w = template((tokens, STEP.value), "e4m3"), template(tile[0], "e4m3")
    out = template((1, 1, tokens, HALF.value), result)
    of_a, of_out, *others = map(Pointer, (torch.float32, torch.float32, torch.float32, torch.int32, torch.int32))
    arguments = a, w, out, of_a, stand_in(scale), of_out, stand_in(input_scale), *others, 2, 2, *values
    build = Build(function, arguments, num_warps=4, maxnreg=AT_LAUNCH, launch_pdl=early)
    return bound(build, (a, w, out), tile, depth, width, gpu, values)


def bind_all(inputs: MoEInputs, config: Config, bind_up: Product, bind_down: Product) -> Bind:
    """bind(inputs, shape) of all launches of a call: rows, quantised tokens, the two products, combine."""
    p, x, early = inputs.problem, inputs.tensors.x, starts_early(inputs.tensors.x)
    bind_quantize = quantize.build(x, inputs.tensors.gate_up_input_scale, inputs.tensors.topk_ids, p.experts, 2 * FLAGS, early)
    bind_combine = combine.build(p, x.dtype, stand_in(inputs.tensors.topk_weights), early)

    def bind(like: MoEInputs, shape: Shape) -> MoELaunch:
        p, (x, _, _, _, ids, *_) = like.problem, like.tensors
        counts, result = RowCounts.of(p, config["block_m"]), contiguous(shape, x.dtype)
        take, allocate = workspace_allocator(x.is_cuda, parts(p, config)), allocator(x.is_cuda)
        sort, quantise, up, down = rows.bind_rows(ids, counts, early), bind_quantize(counts), bind_up(counts), bind_down(counts)
        add = bind_combine(p)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: None, down_bias: None, gate_up_scale: torch.Tensor, down_scale: torch.Tensor,
            gate_up_zero_point: None = None, down_zero_point: None = None,
            gate_up_input_scale: torch.Tensor | None = None, down_input_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:  # fmt: skip
            memory, tables, tokens, active, of_tokens, of_active, products, sums, flags = take()  # kept to the end of this call
            sort(address(ids), tables)
            by_expert = None if gate_up_input_scale is None else address(ids)
            quantise(address(x), argument(gate_up_input_scale), by_expert, tokens, of_tokens, flags, tables)
            of_next = of_active, argument(down_input_scale)
            up(tokens, address(w1), active, of_tokens, address(gate_up_scale), *of_next, sums, flags, tables)
            down(active, address(w2), products, of_active, address(down_scale), of_active, None, sums, flags, tables)
            out = allocate(*result)
            add(products, address(weights), address(out), tables)
            return out

        return call

    return bind
