"""The launches of the four products of moe_bwd_gluon_sm90: built for inputs like these, bound to a number of rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.descriptors import ragged, template
from flashmoe_science.ops.launch import Build, Encoder, Pointer, stand_in
from flashmoe_science.ops.moe.backward.gluon_sm90.config import Z_COLUMNS, by_rows, grid_of_weights
from flashmoe_science.ops.moe.backward.gluon_sm90.hidden import flashmoe_moe_dhidden_gluon_sm90
from flashmoe_science.ops.moe.backward.gluon_sm90.weights import flashmoe_moe_dweights_gluon_sm90
from flashmoe_science.ops.moe.backward.launch import Product
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.call.backward import BackwardInputs
from flashmoe_science.ops.moe.products.gluon_sm90.config import COPYING, GATHERING, REGISTERS, ROWS, STORE_COLUMNS, grid
from flashmoe_science.ops.moe.products.gluon_sm90.kernel import flashmoe_moe_down_gluon_sm90
from flashmoe_science.ops.moe.products.gluon_sm90.launch import Weights, product
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.rows import RowCounts


def rows(inputs: BackwardInputs, config: Config, rank: int = 0) -> Product:
    """The product that gives each row's gradient of x: the forward's second product, by w1 transposed. With a ``rank`` a
    launch takes a low-rank product last: rows [rows, rank], and weights [E, rank, H] beside w1 by rows, else [E, H, rank]."""
    p, t, deep = inputs.problem, inputs.tensors, config["block_k"]
    depth = p.rows_of_w1()
    w1, transposed = by_rows(t.w1), t.w1.stride(2) == 1
    tile = (1, deep, config["block_n"]) if transposed else (1, config["block_n"], deep)
    weights = Weights(tile, tuple(w1.shape), w1.stride())
    constexprs = {"EXPERTS": p.experts, "DEPTH": depth, "WIDTH": p.dim, "TRANSPOSED": transposed, "RANK": rank}
    copies, beside = template((ROWS, deep), p.dtype), weights.beside(rank, transposed)
    bind = product(flashmoe_moe_down_gluon_sm90, t.x, config, copies, weights, beside, constexprs, COPYING)

    def bound(counts: RowCounts) -> KernelLaunch:
        start = bind(counts)
        return lambda dz, w, out, tables, *low: start(dz, w, None, None, None, None, out, tables, *low)

    return bound


def hidden(inputs: BackwardInputs, config: Config, rank: int = 0) -> Product:
    """The first product, which gathers rows of dout. It writes all that it can. With a ``rank`` a launch takes a low-rank
    product last, as that of ``rows``: weights [E, rank, I] beside w2 by rows, else [E, I, rank]."""
    p, a, t, gpu = inputs.problem, inputs.activation, inputs.tensors, current_gpu(inputs.tensors.x.device)
    assert gpu is not None
    w2, transposed, deep, columns = by_rows(t.w2), t.w2.stride(2) == 1, config["block_k"], config["hidden_n"]
    weights = Weights((1, deep, columns) if transposed else (1, columns, deep), tuple(w2.shape), w2.stride())
    w, of_low = template(weights.tile, p.dtype), template((ROWS, deep), p.dtype)
    of_z = template((ROWS, Z_COLUMNS), p.dtype)
    out = template((1, 1, ROWS, STORE_COLUMNS), p.dtype)
    values = (
        p.experts, p.top_k, p.dim, p.hidden, transposed, a.function, a.interleaved, a.alpha, a.limit, rank,
        config["block_m"], columns, config["group"], config["hidden_stages"], *GATHERING,
    )  # fmt: skip
    pointers = (stand_in(t.topk_weights), Pointer(torch.float32), Pointer(torch.int32))
    low = (of_low, w) if rank else (None, None)
    arguments = (Pointer(t.x.dtype), w, of_z, of_z, out, out, out, *low, *pointers, 2, 2, 2, *values)
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": starts_early(t.x)}
    build, width = Build(flashmoe_moe_dhidden_gluon_sm90, arguments, **options), p.hidden
    encode_w = build.encoder(0, w, *weights[1:])
    encode_beside = build.encoder(7, w, *weights.beside(rank, transposed)[1:]) if rank else None
    of_part = 2 * width if a.interleaved else width  # of z's columns: where gates and ups alternate there is one part
    ups = 0 if a.interleaved else 2 * width  # bytes after the gates
    parts = [build.encoder(3 + n, out, *ragged((0, of_part), (2 * width, 1))) for n in range(2)]
    encode_active = build.encoder(5, out, *ragged((0, width), (width, 1)))

    @lru_cache(64)
    def encoders_of_rows(rows: int) -> tuple[Encoder, Encoder, Encoder | None]:
        """The encoders of z and of the low-rank product: maps of more rows would let TMA read past the end of their memory."""
        of_gates, of_ups = (build.encoder(1 + n, of_z, (rows, of_part), (2 * width, 1)) for n in range(2))
        return of_gates, of_ups, build.encoder(6, of_low, (rows, rank), (rank, 1)) if rank else None

    def bind(counts: RowCounts) -> KernelLaunch:
        of_gates, of_ups, encode_low = encoders_of_rows(counts.pairs)
        start = build.bound(grid(counts, width, columns, gpu), counts.pairs, counts.tiles, counts.length, *values)

        def launch(
            dout: Any, w: Any, z: Any, weights: Any, dz: Any, active: Any, partials: Any, tables: Any, *low: Any
        ) -> None:
            given = (*of_gates(z), *of_ups(z + ups), *parts[0](dz), *parts[1](dz + ups), *encode_active(active))
            beside = (None, None)
            if encode_low is not None and encode_beside is not None:
                beside = *encode_low(low[0]), *encode_beside(low[1])
            start(dout, *encode_w(w), *given, *beside, weights, partials, tables)

        return launch

    return bind


def dweights(inputs: BackwardInputs, config: Config, weights: torch.Tensor, total: torch.Tensor | None, stride: int) -> Product:
    """launch(gathered, other, out, tables) of the gradient of ``weights``, which is added to tensors like ``total`` unless that
    is None. Rows of what is gathered, x or dout, are ``stride`` apart."""
    p, t, gpu = inputs.problem, inputs.tensors, current_gpu(inputs.tensors.x.device)
    assert gpu is not None
    made = torch.empty_like(weights, device="meta") if total is None else total
    out = by_rows(made)
    # Of the sides of w1 [E, 2I, H] and of w2 [E, H, I] H is that of what is gathered.
    nth, left_gathered = int(weights is t.w2), (weights is t.w2) == (out is made)
    _, height, width = out.shape
    block_n, block_k = config["block_n"], config["block_k"]
    values = (
        p.experts, p.top_k, height, width, stride, left_gathered, *((None, None) if total is None else out.stride()[:2]),
        block_n, block_k, config["num_stages"], *GATHERING,
    )  # fmt: skip
    of_out = template((1, 1, ROWS, STORE_COLUMNS), p.dtype)
    copied = template((1, 1, block_k, block_n if left_gathered else ROWS), p.dtype)
    gathered = Pointer(t.x.dtype)
    sides = (gathered, copied) if left_gathered else (copied, gathered)
    arguments = (*sides, of_out if total is None else Pointer(total.dtype), Pointer(torch.int32), 2, 2, 2, *values)
    options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": starts_early(t.x)}
    build = Build(flashmoe_moe_dweights_gluon_sm90, arguments, **options)
    of_rows = width if left_gathered else height
    encode = build.encoder(0, copied, *ragged((0, of_rows), (of_rows, 1)))
    whole = (1, p.experts, height, width), (out.stride(0) * p.experts, *out.stride())
    encode_out = build.encoder(1, of_out, *whole) if total is None else None

    def bind(counts: RowCounts) -> KernelLaunch:
        programs = grid_of_weights(p, height, width, block_n, gpu)
        # The counters of tiles follow the tables.
        start = build.bound(programs, counts.pairs, counts.tiles, counts.length + nth, *values)

        def launch(gathered: Any, other: Any, out: Any, tables: Any) -> None:
            sides = (gathered, *encode(other)) if left_gathered else (*encode(other), gathered)
            start(*sides, *((out,) if encode_out is None else encode_out(out)), tables)

        return launch

    return bind
