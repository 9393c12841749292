"""The launches of the two products of moe_grouped_gluon_sm90: built for inputs like these, bound to a number of rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.descriptors import ragged, template
from flashmoe_science.ops.launch import Build, Encoder, Pointer
from flashmoe_science.ops.moe.call import DTYPES, KernelLaunch, MoEInputs
from flashmoe_science.ops.moe.products.gluon_sm90.config import COPYING, GATHERING, REGISTERS, ROWS, STORE_COLUMNS, grid
from flashmoe_science.ops.moe.products.grouped import Product, starts_early
from flashmoe_science.ops.moe.rows import RowCounts


class Weights(NamedTuple):
    """An expert's weights as the copy engine reads them: a tile of one stage, and shape and strides of all experts'."""

    tile: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def beside(self, rank: int, transposed: bool) -> Weights:
        """Contiguous [E, rows, rank], or ``transposed`` [E, rank, rows], in place of [E, rows, depth] or [E, depth, rows]."""
        experts, rows, columns = self.shape
        shape = (experts, rank, columns) if transposed else (experts, rows, rank)
        return Weights(self.tile, shape, (shape[1] * shape[2], shape[2], 1))


def up(function: Any, inputs: MoEInputs, config: Config, rank: int = 0) -> Product:
    """The first product, which gathers rows of x and activates. Its weights are a [E, I / 8, 2, 8, H] view, so that gates and
    ups alternate in eights of a tile; those beside them, [E, 2I, rank], too."""
    p, a, (x, w1, *_) = inputs.problem, inputs.activation, inputs.tensors

    def view(of_expert: int, of_row: int, depth: int) -> Weights:
        tile = (1, config["block_n"] // 16, 2, 8, config["block_k"])
        strides = (of_expert, 8 * of_row, p.hidden * of_row, of_row, 1)
        return Weights(tile, (p.experts, p.hidden // 8, 2, 8, depth), strides)

    constexprs = {
        "EXPERTS": p.experts, "TOP_K": p.top_k, "DEPTH": p.dim, "WIDTH": p.hidden, "STRIDE_X": x.stride(0),
        "FUNCTION": a.function, "ALPHA": a.alpha, "LIMIT": a.limit, "RANK": rank,
    }  # fmt: skip
    weights = view(w1.stride(0), w1.stride(1), p.dim), view(2 * p.hidden * rank, rank, rank)
    # x begins at a multiple of 16 bytes, as was checked.
    return product(function, x, config, Pointer(x.dtype), *weights, constexprs, GATHERING, inputs.saves_z)


def down(function: Any, inputs: MoEInputs, config: Config, rank: int = 0) -> Product:
    """The second product, whose rows follow each other; the weights beside its own are [E, H, rank]."""
    p, x, deep = inputs.problem, inputs.tensors.x, config["block_k"]
    weights = Weights((1, config["block_n"], deep), (p.experts, p.dim, p.hidden), inputs.tensors.w2.stride())
    constexprs = {"EXPERTS": p.experts, "DEPTH": p.hidden, "WIDTH": p.dim, "TRANSPOSED": False, "RANK": rank}
    beside = weights.beside(rank, transposed=False)
    return product(function, x, config, template((ROWS, deep), p.dtype), weights, beside, constexprs, COPYING)


def product(
    function: Any,
    x: torch.Tensor,
    config: Config,
    a: Pointer | TensorDescriptor,
    weights: Weights,
    beside: Weights,
    constexprs: dict[str, Any],
    registers: tuple[int, int],
    saves_z: bool | None = None,
) -> Product:
    """One of the two products, built. ``a``: the pointer to x, or the template of TMA copies of the first product's result.
    ``saves_z``: of the first product. With a RANK a launch takes rows [rows, rank] and weights ``beside`` last."""
    gpu, dtype = current_gpu(x.device), DTYPES[x.dtype]
    assert gpu is not None
    depth, width = constexprs["DEPTH"], constexprs["WIDTH"]
    tiles = (config["block_m"], config["block_n"], config["group"], config["num_stages"], *registers)
    values, w, out = (*constexprs.values(), *tiles), template(weights.tile, dtype), template((1, 1, ROWS, STORE_COLUMNS), dtype)
    of_z = () if saves_z is None else (out, out) if saves_z else (None, None)
    rank, of_low = constexprs["RANK"], template((ROWS, config["block_k"]), dtype)
    low = (of_low, w) if rank else (None, None)
    arguments = (a, w, out, *of_z, *low, Pointer(torch.int32), 2, 2, *values)
    build = Build(function, arguments, num_warps=4, maxnreg=REGISTERS, launch_pdl=starts_early(x))
    maps_of_a = int(isinstance(a, TensorDescriptor))
    encode_w = build.encoder(maps_of_a, w, weights.shape, weights.strides)
    encode_out = build.encoder(maps_of_a + 1, out, *ragged((0, width), (width, 1)))
    of_parts = ragged((0, width), (2 * width, 1))
    encode_z = [build.encoder(2 + n, out, *of_parts) for n in range(2)] if saves_z else None
    maps = maps_of_a + 2 + 2 * bool(saves_z)  # before those of the low-rank product
    encode_beside = build.encoder(maps + 1, w, *beside[1:]) if rank else None

    @lru_cache(64)
    def encoders_of_rows(rows: int) -> tuple[Encoder | None, Encoder | None]:
        """The encoders of a and of the low-rank product: maps of more rows would let TMA read past the end of their memory.
        None for x, which has no map."""
        of_a = build.encoder(0, a, (rows, depth), (depth, 1)) if maps_of_a else None
        return of_a, build.encoder(maps, of_low, (rows, rank), (rank, 1)) if rank else None

    def bind(counts: RowCounts) -> KernelLaunch:
        of_weights = width if saves_z is None else 2 * width  # gates and ups
        (encode_a, encode_low), programs = encoders_of_rows(counts.pairs), grid(counts, of_weights, config["block_n"], gpu)
        start = build.bound(programs, counts.pairs, counts.tiles, *values)

        def launch(a: Any, w: Any, scale: None, zero_point: None, input_scale: None, bias: None, out: Any, *rest: Any) -> None:
            z, (tables, *low) = rest[: bool(of_z)], rest[bool(of_z) :]
            if encode_z is not None:  # the gates, and the ups ``width`` elements of two bytes further
                z = *encode_z[0](z[0]), *encode_z[1](z[0] + 2 * width)
            elif of_z:
                z = None, None
            beside = (None, None)
            if encode_low is not None and encode_beside is not None:
                beside = *encode_low(low[0]), *encode_beside(low[1])
            start(*((a,) if encode_a is None else encode_a(a)), *encode_w(w), *encode_out(out), *z, *beside, tables)

        return launch

    return bind
