"""The launches of both kernels: products built for inputs like these, and all launches of a call around them."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.descriptors import template
from flashmoe_science.ops.launch import Build, Pointer, address, allocator, argument, stand_in, workspace_allocator
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import Bind, MoEInputs, MoELaunch, Shape, contiguous
from flashmoe_science.ops.moe.products.formats import scales_in_format
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.products.stream_k_launch import Product, Tile, bound
from flashmoe_science.ops.moe.products.weights_sm90 import permute
from flashmoe_science.ops.moe.products.weights_sm90.config import (
    FLAGS,
    blocks_of_experts,
    parts,
    registers_of,
    rows_of_a_column,
)
from flashmoe_science.ops.moe.products.weights_sm90.operand import BYTES_OF_STAGE, CHUNK, span_of
from flashmoe_science.ops.moe.rows import RowCounts

_BYTES = BYTES_OF_STAGE.value
# Products launch(a, w, out, scales, zero points, bias, partial, flags, tables)


def up(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The first product. Its w1 is a [blocks of a thread's columns, 4 or 2, 2, 8, bytes] view: eight gates, then their ups."""
    p, a, tensors = inputs.problem, inputs.activation, inputs.tensors
    (column, of_up), of_row, of_experts = rows_of_a_column(inputs), tensors.w1.stride(1), blocks_of_experts(inputs)
    rows, span = _rows(config), span_of(str(p.weight_format))
    tile = (
        (4, rows // 64, 2, 8, _BYTES),
        ((p.experts - 1) * of_experts + p.hidden // span, span // 8, 2, 8, tensors.w1.shape[2]),
        (span * column * of_row, 8 * column * of_row, of_up * of_row, column * of_row, 1),
    )
    constexprs = {
        "EXPERTS": p.experts, "DEPTH": p.dim, "WIDTH": p.hidden, "SCALES": _of_scales(inputs, 0, config),
        "EXPERT_BLOCKS": of_experts, "COLUMN": column, "UP": of_up, "FUNCTION": a.function, "ALPHA": a.alpha, "LIMIT": a.limit,
    }  # fmt: skip
    of_weights = tensors.gate_up_scale, tensors.gate_up_zero_point, tensors.gate_up_bias
    return _product(function, tensors.x, config, tile, permute.padded(p.hidden), of_weights, constexprs, rows // 2)


def down(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The second product."""
    p, tensors = inputs.problem, inputs.tensors
    tile = (1, _rows(config), _BYTES), tuple(tensors.w2.shape), tensors.w2.stride()
    constexprs = {"EXPERTS": p.experts, "DEPTH": p.hidden, "WIDTH": p.dim, "SCALES": _of_scales(inputs, 1, config)}
    of_weights = tensors.down_scale, tensors.down_zero_point, tensors.down_bias
    return _product(function, tensors.x, config, tile, p.dim, of_weights, constexprs, CHUNK.value)


def _rows(config: Config) -> int:
    """Rows of weights of a consumer."""
    return config["block_n"] // config["consumers"]


def _of_scales(inputs: MoEInputs, nth: int, config: Config) -> tuple[Any, ...]:
    """The constexpr SCALES (``scales.py``) of a product."""
    both, of = inputs.tensors.in_format(), scales_in_format(inputs)[nth]
    assert both is not None
    scale, size = both[nth].scale, both[nth].scale.element_size()
    strides, columns = (*scale.stride(), 0)[:3], (*scale.shape, 1)[2]
    even = not any(number % 2 for number in (scale.data_ptr(), columns, *strides[:2])) and strides[2] == 1
    paired = of.name == "mxfp4" and even and config["block_m"] != 128  # whose sums leave no registers for it
    up = rows_of_a_column(inputs)[1] if inputs.activation.interleaved else of.second
    of_rows = columns, of.high, of.wide, up, scale.shape[1] * of.high, paired
    of_zeros = (4 * stride for stride in of.of_zero_points)
    return of.name, size, scale.dtype == torch.float16, *(size * stride for stride in strides), *of_rows, *of_zeros


def _product(
    function: Any,
    x: torch.Tensor,
    config: Config,
    tile: Tile,
    width: int,
    of_weights: tuple[torch.Tensor | None, ...],
    constexprs: dict[str, Any],
    columns: int,
) -> Product:
    """One of the two, built; ``width`` of its result, ``columns`` of a copy to it; ``of_weights``: scales, zero
    points and biases."""
    gpu, early = current_gpu(x.device), starts_early(x)
    tokens, depth = config["block_m"], permute.padded(constexprs["DEPTH"])
    assert gpu is not None
    registers = registers_of(config)
    of_config = *(config[name] for name in ("group", "num_stages", "consumers")), registers.consumer, registers.producer
    values = *constexprs.values(), *of_config
    a, w = template((tokens, CHUNK.value), "bf16"), template(tile[0], "uint8")
    out = template((1, 1, tokens, columns), "bf16")
    scale, zero, bias = of_weights
    of_bytes = (None if one is None else Pointer(torch.uint8, one.data_ptr()) for one in (scale, zero))
    pointers = *of_bytes, stand_in(bias), Pointer(torch.float32), Pointer(torch.int32), Pointer(torch.int32)
    build = Build(function, (a, w, out, *pointers, 2, 2, *values), num_warps=4, maxnreg=registers.at_launch, launch_pdl=early)
    return bound(build, (a, w, out), tile, depth, width, gpu, values)


def bind_all(inputs: MoEInputs, config: Config, bind_up: Product, bind_down: Product) -> Bind:
    """bind(inputs, shape) of all launches of a call: rows, permuted tokens, the two products, combine."""
    p, x, early = inputs.problem, inputs.tensors.x, starts_early(inputs.tensors.x)
    bind_permute = permute.build(x, span_of(str(p.weight_format)), p.experts, p.top_k, 2 * FLAGS, early)
    bind_combine = combine.build(p, x.dtype, stand_in(inputs.tensors.topk_weights), early)

    def bind(like: MoEInputs, shape: Shape) -> MoELaunch:
        p, (x, _, _, _, ids, *_) = like.problem, like.tensors
        counts, result = RowCounts.of(p, config["block_m"]), contiguous(shape, x.dtype)
        take, allocate = workspace_allocator(x.is_cuda, parts(p, config)), allocator(x.is_cuda)
        sort, gather, up, down = rows.bind_rows(ids, counts, early), bind_permute(counts), bind_up(counts), bind_down(counts)
        add = bind_combine(p)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
            gate_up_scale: torch.Tensor, down_scale: torch.Tensor,
            gate_up_zero_point: torch.Tensor | None = None, down_zero_point: torch.Tensor | None = None, *input_scales: None,
        ) -> torch.Tensor:  # fmt: skip
            memory, tables, tokens, active, products, sums, flags = take()  # kept alive to the end of this call
            sort(address(ids), tables)
            gather(address(x), tokens, flags, tables)
            of_up = address(gate_up_scale), argument(gate_up_zero_point), argument(gate_up_bias)
            up(tokens, address(w1), active, *of_up, sums, flags, tables)
            of_down = address(down_scale), argument(down_zero_point), argument(down_bias)
            down(active, address(w2), products, *of_down, sums, flags, tables)
            out = allocate(*result)
            add(products, address(weights), address(out), tables)
            return out

        return call

    return bind
