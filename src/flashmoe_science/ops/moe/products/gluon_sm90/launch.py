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


def up(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The first product, which gathers rows of x and activates. Its weights are a [E, I / 8, 2, 8, H] view, so that gates and
    ups alternate in eights of a tile."""
    p, a, (x, w1, *_) = inputs.problem, inputs.activation, inputs.tensors
    of_expert, of_row, _ = w1.stride()
    weights = Weights(
        (1, config["block_n"] // 16, 2, 8, config["block_k"]),
        (p.experts, p.hidden // 8, 2, 8, p.dim),
        (of_expert, 8 * of_row, p.hidden * of_row, of_row, 1),
    )
    constexprs = {
        "EXPERTS": p.experts, "TOP_K": p.top_k, "DEPTH": p.dim, "WIDTH": p.hidden, "STRIDE_X": x.stride(0),
        "FUNCTION": a.function, "ALPHA": a.alpha, "LIMIT": a.limit,
    }  # fmt: skip
    # x begins at a multiple of 16 bytes, as was checked.
    return product(function, x, config, Pointer(x.dtype), weights, constexprs, GATHERING, inputs.saves_z)


def down(function: Any, inputs: MoEInputs, config: Config) -> Product:
    """The second product, whose rows follow each other."""
    p, x, deep = inputs.problem, inputs.tensors.x, config["block_k"]
    weights = Weights((1, config["block_n"], deep), (p.experts, p.dim, p.hidden), inputs.tensors.w2.stride())
    constexprs = {"EXPERTS": p.experts, "DEPTH": p.hidden, "WIDTH": p.dim, "TRANSPOSED": False}
    return product(function, x, config, template((ROWS, deep), p.dtype), weights, constexprs, COPYING)


def product(
    function: Any,
    x: torch.Tensor,
    config: Config,
    a: Pointer | TensorDescriptor,
    weights: Weights,
    constexprs: dict[str, Any],
    registers: tuple[int, int],
    saves_z: bool | None = None,
) -> Product:
    """One of the two, built; ``a``: the pointer to x, or the template of copies of what the first product wrote. ``saves_z``:
    of the first product."""
    gpu, dtype = current_gpu(x.device), DTYPES[x.dtype]
    assert gpu is not None
    depth, width = constexprs["DEPTH"], constexprs["WIDTH"]
    tiles = (config["block_m"], config["block_n"], config["group"], config["num_stages"], *registers)
    values, w, out = (*constexprs.values(), *tiles), template(weights.tile, dtype), template((1, 1, ROWS, STORE_COLUMNS), dtype)
    of_z = () if saves_z is None else (out, out) if saves_z else (None, None)
    arguments = (a, w, out, *of_z, Pointer(torch.int32), 2, 2, *values)
    build = Build(function, arguments, num_warps=4, maxnreg=REGISTERS, launch_pdl=starts_early(x))
    maps_of_a = int(isinstance(a, TensorDescriptor))
    encode_w = build.encoder(maps_of_a, w, weights.shape, weights.strides)
    encode_out = build.encoder(maps_of_a + 1, out, *ragged((0, width), (width, 1)))
    of_parts = ragged((0, width), (2 * width, 1))
    encode_z = [build.encoder(2 + n, out, *of_parts) for n in range(2)] if saves_z else None

    @lru_cache(64)
    def encoder_of_a(rows: int) -> Encoder | None:
        """A map of more rows would let the copy engine read past the end of their memory. None for x, which has no map."""
        return build.encoder(0, a, (rows, depth), (depth, 1)) if maps_of_a else None

    def bind(counts: RowCounts) -> KernelLaunch:
        of_weights = width if saves_z is None else 2 * width  # gates and ups
        encode_a, programs = encoder_of_a(counts.pairs), grid(counts, of_weights, config["block_n"], gpu)
        start = build.bound(programs, counts.pairs, counts.tiles, *values)

        def launch(a: Any, w: Any, scale: None, zero_point: None, bias: None, out: Any, *rest: Any) -> None:
            *z, tables = rest
            if encode_z is not None:  # the gates, and the ups ``width`` elements of two bytes further
                z = [*encode_z[0](z[0]), *encode_z[1](z[0] + 2 * width)]
            elif of_z:
                z = [None, None]
            start(*((a,) if encode_a is None else encode_a(a)), *encode_w(w), *encode_out(out), *z, tables)

        return launch

    return bind
