"""The launches of bwd_triton: bound once to shapes, strides and dtypes, then called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.backward.tiled_triton.bias import flashmoe_bwd_dbias_triton
from flashmoe_science.ops.attention.backward.tiled_triton.config import (
    DELTA_ROWS,
    DELTA_WARPS,
    KEYS,
    QUERIES,
    Tile,
    constexprs_of,
    keys_first,
    tile_of,
)
from flashmoe_science.ops.attention.backward.tiled_triton.delta import flashmoe_bwd_delta_triton
from flashmoe_science.ops.attention.backward.tiled_triton.keys import flashmoe_bwd_dkdv_triton
from flashmoe_science.ops.attention.backward.tiled_triton.queries import flashmoe_bwd_dq_triton
from flashmoe_science.ops.attention.call.backward import (
    BackwardInputs,
    BackwardLaunch,
    BackwardLauncher,
    Gradients,
    Saved,
    Wanted,
    gradients_like,
    unexpanded,
)
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors, max_keys, sequences
from flashmoe_science.ops.attention.device.launch import check_programs, element_pointer
from flashmoe_science.ops.attention.device.mask_triton import FAR, window_of
from flashmoe_science.ops.attention.device.sinks_triton import PARTS_AT_ONCE, SINKS_WARPS, flashmoe_bwd_dsinks_triton
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import (
    Build,
    Grid,
    Pointer,
    allocator,
    argument,
    cdiv,
    stride_class,
    stride_unit,
    workspace_allocator,
)

_Start = Callable[..., None]


class _Sizes(NamedTuple):
    """The sizes of a call, and the strides of its rows: three each of q, k, v, dout and out."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    rows: int  # of the queries of a head of one batch: of packed ones, of all sequences
    strides: tuple[tuple[int, ...], ...]


class TiledBackwardLauncher(BackwardLauncher):
    """The kernels with a config; see BackwardLauncher."""

    def __init__(self, inputs: BackwardInputs, config: Config) -> None:
        self._problem, self._config = inputs.problem, config
        tensors, saved = inputs.tensors, inputs.saved
        self._qkv = tuple(Pointer(one.dtype, one.data_ptr()) for one in tensors[:3])
        self._out, self._dout = (Pointer(one.dtype, one.data_ptr()) for one in (saved.out, saved.dout))
        self._sums = Pointer(torch.float32)
        self._builds: dict[Hashable, Build] = {}

    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        of_gradients, packed = gradients_like(tensors, wanted), tensors.cu_seqlens_q is not None
        sizes = _sizes_of(tensors, saved, options)
        parts = cdiv(sizes.rows, DELTA_ROWS) * (1 if packed else sizes.batch)
        take = workspace_allocator(
            tensors.q.device.type == "cuda",
            [(tensors.q.shape[0] * sizes.heads * sizes.rows, torch.float32), (sizes.heads * parts, torch.float32)],
        )
        delta, add_sinks = self._bind_delta(tensors, saved, sizes, parts, wanted.dsinks)
        of_keys = self._bind_keys(tensors, sizes, of_gradients.dk is not None, of_gradients.dv is not None)
        of_queries = self._bind_queries(tensors, sizes) if wanted.dq else None
        of_bias = self._bind_bias(tensors, sizes) if wanted.dbias else None
        new, softcap = allocator(tensors.q.device.type == "cuda"), float(options.softcap)

        def launch(tensors: Given, saved: Given, scale: float) -> Gradients:
            made = [None if one is None else new(*one) for one in of_gradients]
            if packed:  # rows that no sequence owns or uses are written nowhere else
                for one in made[:3]:
                    if one is not None:
                        one.zero_()
            dq, dk, dv, dsinks, dbias = map(argument, made)
            given = tuple(map(argument, tensors[:15]))
            q, k, v, cu_q, cu_k, used, *_, sinks, slopes, bias, prefixes, _, _ = given
            out, lse, dout, dlse = map(argument, saved)
            workspace, sums, partials = take()
            if add_sinks is None:
                delta(out, dout, lse, dlse, None, cu_q, sums, None)
            else:
                delta(out, dout, lse, dlse, sinks, cu_q, sums, partials)
                add_sinks(partials, dsinks)
            if of_keys is not None:
                of_keys(q, k, v, dout, lse, sums, dk, dv, cu_q, cu_k, used, slopes, bias, prefixes, scale, softcap)
            if of_queries is not None:
                of_queries(q, k, v, dout, lse, sums, dq, cu_q, cu_k, used, slopes, bias, prefixes, scale, softcap)
            if of_bias is not None:
                of_bias(q, k, v, dout, lse, sums, dbias, bias, prefixes, scale, softcap)
            del workspace
            return Gradients(*made)

        return launch

    def _bind_delta(
        self, tensors: Tensors, saved: Saved, sizes: _Sizes, parts: int, with_sinks: bool
    ) -> tuple[_Start, _Start | None]:
        """The launches of delta, and of dSinks where it is wanted."""
        *_, of_dout, of_out = sizes.strides
        sinks, batches = tensors.sinks, tensors.q.shape[0]
        constexprs = (
            self._problem.head_dim_v, padded_head_dim(self._problem.head_dim_v), DELTA_ROWS,
            is_wide((of_out, of_dout), DELTA_ROWS), stride_unit((*of_out, *of_dout)),
        )  # fmt: skip
        of_sinks = element_pointer(sinks) if with_sinks else None
        pointers = (
            self._out, self._dout, self._sums, None if saved.dlse is None else self._sums, of_sinks,
            element_pointer(tensors.cu_seqlens_q), self._sums, None if of_sinks is None else self._sums,
        )  # fmt: skip
        numbers = (*of_out, *of_dout, sizes.heads, sizes.rows, sizes.batch, parts)
        build = self._build(flashmoe_bwd_delta_triton, pointers, numbers, constexprs, DELTA_WARPS, 1)
        programs = cdiv(sizes.rows, DELTA_ROWS) * sizes.heads * batches
        start = build.bound(_grid(programs), *numbers, *constexprs)
        if of_sinks is None or sinks is None:
            return start, None
        adding = (self._sums, element_pointer(sinks)), (parts,), (PARTS_AT_ONCE,)
        build = self._build(flashmoe_bwd_dsinks_triton, *adding, SINKS_WARPS, 1)
        return start, build.bound((sizes.heads, 1, 1), parts, PARTS_AT_ONCE)

    def _bind_keys(self, tensors: Tensors, sizes: _Sizes, with_dk: bool, with_dv: bool) -> _Start | None:
        if not (with_dk or with_dv):
            return None
        of_dk, of_dv = (_strides_of(one, tensors) for one in gradients_like(tensors, Wanted())[1:3])
        gradients = tuple(Pointer(tensors.q.dtype) if wanted else None for wanted in (with_dk, with_dv))
        strides = sizes._replace(strides=(*sizes.strides[:4], of_dk, of_dv))
        tile = tile_of(self._config, KEYS)
        programs = cdiv(sizes.seqlen_k, tile[1]) * sizes.heads_kv * sizes.batch
        return self._bind(flashmoe_bwd_dkdv_triton, tensors, strides, gradients, tile, programs, keys_first(tile))

    def _bind_queries(self, tensors: Tensors, sizes: _Sizes) -> _Start:
        of_dq = _strides_of(gradients_like(tensors, Wanted()).dq, tensors)
        strides = sizes._replace(strides=(*sizes.strides[:4], of_dq))
        tile = tile_of(self._config, QUERIES)
        programs = cdiv(sizes.seqlen_q, tile[0]) * sizes.heads * sizes.batch
        return self._bind(flashmoe_bwd_dq_triton, tensors, strides, (Pointer(tensors.q.dtype),), tile, programs)

    def _bind(
        self, function: Any, tensors: Tensors, sizes: _Sizes, gradients: tuple[Pointer | None, ...], tile: Tile, programs: int,
        *more: bool,
    ) -> _Start:  # fmt: skip
        """The launch of dK and dV, or of dQ; ``more`` constexprs of its own."""
        left, right = window_of(self._problem, sizes.seqlen_q)
        strides = [step for one in sizes.strides for step in one]
        of_bias = (0, 0, 0, 0) if tensors.bias is None else tensors.bias.stride()
        numbers = (
            *strides, 0 if tensors.alibi_slopes is None else tensors.alibi_slopes.stride(0), *of_bias,
            sizes.heads_kv, sizes.heads // sizes.heads_kv, sizes.seqlen_q, sizes.seqlen_k, sizes.rows,
            left, FAR if right is None else right,
        )  # fmt: skip
        wide = is_wide(sizes.strides, max(tile[:2]))
        shared = constexprs_of(self._problem, tile, right is not None, wide, stride_unit(strides)).values()
        constexprs = (*shared, *more)
        pointers = (
            *self._qkv, self._dout, self._sums, self._sums, *gradients,
            *map(element_pointer, (*tensors[3:6], tensors.alibi_slopes, tensors.bias, tensors.prefix)),
        )  # fmt: skip
        build = self._build(function, (*pointers, 0.5, 0.5), numbers, constexprs, *tile[2:])
        return build.bound(_grid(programs), *numbers, *constexprs)

    def _bind_bias(self, tensors: Tensors, sizes: _Sizes) -> _Start:
        assert tensors.bias is not None
        tile = tile_of(self._config, QUERIES)
        tiles_m, tiles_n = cdiv(sizes.seqlen_q, tile[0]), cdiv(sizes.seqlen_k, tile[1])
        one = [size == 1 for size in unexpanded(tensors.bias).shape]
        counts = (sizes.batch, sizes.heads, tiles_m, tiles_n)
        own = tuple(count if alone else 1 for count, alone in zip(counts, one, strict=True))
        left, right = window_of(self._problem, sizes.seqlen_q)
        strides = [step for one in sizes.strides[:4] for step in one]
        numbers = (
            *strides, *tensors.bias.stride(), sizes.heads_kv, sizes.heads // sizes.heads_kv, sizes.seqlen_q, sizes.seqlen_k,
            sizes.rows, left, FAR if right is None else right, sizes.batch, tiles_m, tiles_n,
            *own,
        )  # fmt: skip
        wide = is_wide(sizes.strides, max(tile[:2]))
        shared = constexprs_of(self._problem, tile, right is not None, wide, stride_unit(strides)).values()
        constexprs = (*shared, *one[2:])
        pointers = (
            *self._qkv, self._dout, self._sums, self._sums, Pointer(tensors.bias.dtype), element_pointer(tensors.bias),
            element_pointer(tensors.prefix), 0.5, 0.5,
        )  # fmt: skip
        build = self._build(flashmoe_bwd_dbias_triton, pointers, numbers, constexprs, tile[2], 1)
        programs = 1
        for count, mine in zip(counts, own, strict=True):
            programs *= count // mine
        return build.bound(_grid(programs), *numbers, *constexprs)

    def _build(
        self, function: Any, pointers: tuple[Any, ...], numbers: tuple[int, ...], constexprs: tuple[Any, ...],
        num_warps: int, num_stages: int,
    ) -> Build:  # fmt: skip
        kinds = tuple((one.dtype, one.data_ptr()) if isinstance(one, Pointer) else one is None for one in pointers)
        key = (function, kinds, stride_class(numbers), constexprs)
        build = self._builds.get(key)
        if build is None:
            arguments = (*pointers, *numbers, *constexprs)
            build = self._builds[key] = Build(function, arguments, num_warps=num_warps, num_stages=num_stages)
        return build


def _grid(programs: int) -> Grid:
    check_programs(programs)
    return (programs, 1, 1)


def _strides_of(made: Any, tensors: Tensors) -> tuple[int, ...]:
    """Strides by batch, head and row. Packed sequences differ by their rows alone."""
    of_batch, *others = made.stride()[:3] if isinstance(made, torch.Tensor) else made.strides[:3]
    return (of_batch if tensors.cu_seqlens_q is None else 0, *others)


def is_wide(strides: tuple[tuple[int, ...], ...], rows: int) -> bool:
    """Whether a tile of that many rows may span 2^31 elements."""
    return max(one[2] for one in strides) * rows >= 2**31


def _sizes_of(tensors: Tensors, saved: Saved, options: Options) -> _Sizes:
    q, k = tensors.q, tensors.k
    (_, heads, rows, _), heads_kv = q.shape, k.shape[1]
    seqlen_q, seqlen_k = rows, k.shape[2]
    strides = [_strides_of(one, tensors) for one in (*tensors[:3], saved.dout, saved.out)]
    if tensors.cu_seqlens_q is not None:
        seqlen_q, seqlen_k = min(options.max_seqlen_q, rows), max_keys(tensors, options)
    return _Sizes(sequences(tensors), heads, heads_kv, seqlen_q, seqlen_k, rows, tuple(strides))
