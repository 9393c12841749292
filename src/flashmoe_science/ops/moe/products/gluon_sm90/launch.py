"""The launches of the two products of moe_grouped_gluon_sm90: built for inputs like these, bound to a number of rows."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.descriptors import ragged, template
from flashmoe_science.ops.launch import Build, Encoder, Pointer
from flashmoe_science.ops.moe.call import KernelLaunch, MoEInputs
from flashmoe_science.ops.moe.products.gluon_sm90.config import REGISTERS, down_of, grid, up_of
from flashmoe_science.ops.moe.rows import RowCounts


class Up:
    """The first product, which gathers rows of x and activates."""

    def __init__(self, function: Any, inputs: MoEInputs, config: Config, gpu: Gpu, early_start: bool) -> None:
        p, (of_expert, of_row, _) = inputs.problem, inputs.w1.stride()
        self._weights, self._config, self._gpu = 2 * p.hidden, config, gpu
        product = up_of(p, inputs.activation, config, inputs.x.stride(0))
        self._constexprs = tuple(product.constexprs.values())
        w, out = (template(block, p.dtype) for block in product.blocks.values())
        x, tables = Pointer(inputs.x.dtype), Pointer(torch.int32)  # x begins at a multiple of 16 bytes, as was checked
        self._build = _build(function, (x, w, out, tables, 2, 2, *self._constexprs), early_start)
        gates_and_ups = (p.experts, p.hidden // 8, 2, 8, p.dim), (of_expert, 8 * of_row, p.hidden * of_row, of_row, 1)
        self._encode_w = self._build.encoder(0, w, *gates_and_ups)
        self._encode_out = self._build.encoder(1, out, *ragged((0, p.hidden), (p.hidden, 1)))

    def bind(self, counts: RowCounts) -> KernelLaunch:
        encode_w, encode_out = self._encode_w, self._encode_out
        programs = grid(counts, self._weights, self._config, self._gpu)
        start = self._build.bound(programs, counts.pairs, counts.tiles, *self._constexprs)

        def launch(x: Any, w: Any, bias: None, out: Any, tables: Any) -> None:
            start(x, *encode_w(w), *encode_out(out), tables)

        return launch


class Down:
    """The second product, whose rows follow each other."""

    def __init__(self, function: Any, inputs: MoEInputs, config: Config, gpu: Gpu, early_start: bool) -> None:
        p = inputs.problem
        self._dim, self._hidden, self._config, self._gpu = p.dim, p.hidden, config, gpu
        product = down_of(p, config)
        self._constexprs = tuple(product.constexprs.values())
        self._a, w, out = (template(block, p.dtype) for block in product.blocks.values())
        self._build = _build(function, (self._a, w, out, Pointer(torch.int32), 2, 2, *self._constexprs), early_start)
        self._encode_w = self._build.encoder(1, w, (p.experts, p.dim, p.hidden), inputs.w2.stride())
        self._encode_out = self._build.encoder(2, out, *ragged((0, p.dim), (p.dim, 1)))
        self._encoders: Cache[int, Encoder] = Cache(64)  # of a, by its rows

    def bind(self, counts: RowCounts) -> KernelLaunch:
        encode_a, encode_w, encode_out = self._encoder_of(counts.pairs), self._encode_w, self._encode_out
        programs = grid(counts, self._dim, self._config, self._gpu)
        start = self._build.bound(programs, counts.pairs, counts.tiles, *self._constexprs)

        def launch(a: Any, w: Any, bias: None, out: Any, tables: Any) -> None:
            start(*encode_a(a), *encode_w(w), *encode_out(out), tables)

        return launch

    def _encoder_of(self, rows: int) -> Encoder:
        """A map of more rows would let the copy engine read past the end of their memory."""
        made = self._encoders.get(rows)
        if made is None:
            made = self._encoders[rows] = self._build.encoder(0, self._a, (rows, self._hidden), (self._hidden, 1))
        return made


def _build(function: Any, arguments: tuple[Any, ...], early_start: bool) -> Build:
    return Build(function, arguments, num_warps=4, maxnreg=REGISTERS, launch_pdl=early_start)
