"""The launches of moe_mxfp4_gluon_sm90: its products built for inputs like these, and all launches of a call around them."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.descriptors import template
from flashmoe_science.ops.launch import Build, Pointer, address, allocator, argument, stand_in, workspace_allocator
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import Bind, MoEInputs, MoELaunch, Shape, contiguous
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.products.mxfp4_sm90 import permute
from flashmoe_science.ops.moe.products.mxfp4_sm90.config import (
    FLAGS,
    WIDEST,
    blocks_of_experts,
    parts,
    registers_of,
    rows_of_a_column,
)
from flashmoe_science.ops.moe.products.mxfp4_sm90.operand import CHUNK, STEP
from flashmoe_science.ops.moe.products.stream_k_launch import Product, Tile, bound
from flashmoe_science.ops.moe.rows import RowCounts

_BYTES = STEP.value // 2
# Products launch(a, w, out, scales, bias, partial, flags, tables)


def up(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The first product. Its w1 is a [blocks of 32 columns, 4, 2, 8, bytes] view: eight gates and their ups take turns."""
    p, a, tensors = inputs.problem, inputs.activation, inputs.tensors
    (column, of_up), of_row, of_experts = rows_of_a_column(inputs), tensors.w1.stride(1), blocks_of_experts(inputs)
    rows = _rows(config)
    tile = (
        (4, rows // 64, 2, 8, _BYTES),
        ((p.experts - 1) * of_experts + p.hidden // 32, 4, 2, 8, p.dim // 2),
        (32 * column * of_row, 8 * column * of_row, of_up * of_row, column * of_row, 1),
    )
    constexprs = {
        "EXPERTS": p.experts, "DEPTH": p.dim, "WIDTH": p.hidden, **_of_scales(tensors.gate_up_scale, config),
        "EXPERT_BLOCKS": of_experts, "COLUMN": column, "UP": of_up, "FUNCTION": a.function, "ALPHA": a.alpha, "LIMIT": a.limit,
    }  # fmt: skip
    scale, bias = tensors.gate_up_scale, tensors.gate_up_bias
    return _product(function, tensors.x, config, tile, permute.padded(p.hidden), (scale, bias), constexprs, rows // 2)


def down(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The second product."""
    p, tensors = inputs.problem, inputs.tensors
    tile = (1, _rows(config), _BYTES), (p.experts, p.dim, p.hidden // 2), tensors.w2.stride()
    constexprs = {"EXPERTS": p.experts, "DEPTH": p.hidden, "WIDTH": p.dim, **_of_scales(tensors.down_scale, config)}
    return _product(function, tensors.x, config, tile, p.dim, (tensors.down_scale, tensors.down_bias), constexprs, CHUNK.value)


def _rows(config: Config) -> int:
    """Rows of weights of a consumer."""
    return config["block_n"] // config["consumers"]


def _of_scales(scale: torch.Tensor | None, config: Config) -> dict[str, Any]:
    assert scale is not None
    even = not any(number % 2 for number in (scale.data_ptr(), *scale.shape[2:], *scale.stride()[:2]))
    paired = even and config["block_m"] != 128  # whose sums leave no registers for it
    return {"STRIDE_E": scale.stride(0), "STRIDE_N": scale.stride(1), "PAIRED": paired}


def _product(
    function: Any,
    x: torch.Tensor,
    config: Config,
    tile: Tile,
    width: int,
    of_weights: tuple[torch.Tensor | None, torch.Tensor | None],
    constexprs: dict[str, Any],
    columns: int,
) -> Product:
    """One of the two, built; ``width`` of its result, ``columns`` of a copy to it; ``of_weights``: scales and biases."""
    gpu, early = current_gpu(x.device), starts_early(x)
    tokens, depth = config["block_m"], permute.padded(constexprs["DEPTH"])
    assert gpu is not None
    registers = registers_of(config)
    of_config = *(config[name] for name in ("group", "num_stages", "consumers")), registers.consumer, registers.producer
    values = *constexprs.values(), *of_config
    a, w = template((tokens, CHUNK.value), "bf16"), template(tile[0], "uint8")
    at_once = tokens if tokens < WIDEST else 2048 // columns  # the widest tiles' stages leave little memory
    out = template((1, 1, at_once, columns), "bf16")
    pointers = *map(stand_in, of_weights), Pointer(torch.float32), Pointer(torch.int32), Pointer(torch.int32)
    build = Build(function, (a, w, out, *pointers, 2, 2, *values), num_warps=4, maxnreg=registers.at_launch, launch_pdl=early)
    return bound(build, (a, w, out), tile, depth, width, gpu, values)


def bind_all(inputs: MoEInputs, config: Config, bind_up: Product, bind_down: Product) -> Bind:
    """bind(inputs, shape) of all launches of a call: rows, permuted tokens, the two products, combine."""
    p, x, early = inputs.problem, inputs.tensors.x, starts_early(inputs.tensors.x)
    bind_permute = permute.build(x, p.experts, p.top_k, 2 * FLAGS, early)
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
            gate_up_scale: torch.Tensor, down_scale: torch.Tensor, *zero_points: None,
        ) -> torch.Tensor:  # fmt: skip
            memory, tables, tokens, active, products, sums, flags = take()  # kept alive to the end of this call
            sort(address(ids), tables)
            gather(address(x), tokens, flags, tables)
            up(tokens, address(w1), active, address(gate_up_scale), argument(gate_up_bias), sums, flags, tables)
            down(active, address(w2), products, address(down_scale), argument(down_bias), sums, flags, tables)
            out = allocate(*result)
            add(products, address(weights), address(out), tables)
            return out

        return call

    return bind
