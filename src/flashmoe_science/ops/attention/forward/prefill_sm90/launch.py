"""The launches of the prefill kernel: bound once to shapes and strides, then called with tensors; of packed sequences too."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.kernel import AttentionLaunch, Launcher, shape_of
from flashmoe_science.ops.attention.call.outputs import Result, out_strides, outputs_of
from flashmoe_science.ops.attention.call.tensors import Given, MaybeTensor, Options, Tensors
from flashmoe_science.ops.attention.device.bias_args import bias_of, placeholders
from flashmoe_science.ops.attention.device.sm90 import ROWS, registers, window_of
from flashmoe_science.ops.attention.device.tma import Parts, cached_descriptors, copied_strides, encoders_of
from flashmoe_science.ops.attention.forward.prefill_sm90.config import fitted
from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import list_of_tiles, max_tiles, numbers
from flashmoe_science.ops.attention.forward.prefill_sm90.variant import (
    EVEN,
    PACKED,
    SIZES,
    Variant,
    constexprs_of,
    grid_of,
    heads_of_tile,
    is_packed,
    packed_grid,
    pair_rounds_of,
    queries_of_tile,
    tile_shapes,
    tiles_of_head,
    variant_of,
)
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.descriptors import MOST_ROWS, ragged, template
from flashmoe_science.ops.launch import Build, Grid, Pointer, allocator, argument


class _OfQueries(NamedTuple):
    """What of a launch stays as it is while a cache of keys and values grows."""

    build: Build
    grid: Grid
    encode_q: Parts
    encode_out: Parts
    tail: tuple[Any, ...]  # the kernel's arguments after ``causal_offset``


class FwdLauncher(Launcher):
    """The kernel with a config; see Launcher. A length costs the host what depends on it, and no more.

    Args:
        function: the kernel, to be built. dtypes: of sinks, slopes and bias, None for none.
    """

    def __init__(
        self, function: Any, problem: AttentionProblem, config: Config, gpu: Gpu, write_lse: bool, early_start: bool,
        dtypes: Sequence[torch.dtype | None] = (None, None, None),
    ) -> None:  # fmt: skip
        self._function = function
        self._problem, self._config, self._gpu, self._write_lse, self._dtypes = problem, config, gpu, write_lse, dtypes
        tiles = tile_shapes(problem, config)
        self._templates = tuple(None if tile is None else template(tile, problem.dtype) for tile in tiles)
        self._early_start = early_start
        self._options = {"num_warps": 4, "maxnreg": registers(config), "launch_pdl": early_start}
        self._builds: dict[Variant, tuple[Build, tuple[Any, ...]]] = {}
        self._of_queries: Cache[Hashable, _OfQueries] = Cache(64)
        self._block_n, self._causal, self._mask = config["block_n"], problem.causal, problem.mask
        self._left, self._right = window_of(problem)
        self._capped = bool(problem.features.softcap)

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        q, k, v, bias_ = *tensors[:3], tensors.bias
        (_, heads, rows, _), (_, heads_kv, keys, _) = q.shape, k.shape
        strides_out = out_strides(tensors, out)
        bias, offset = bias_of(tensors), keys - rows if self._mask == "causal" else 0
        even = offset >= EVEN * rows
        diagonal = self._causal and (even, offset % ROWS == 0)
        key = (q.shape, q.stride(), strides_out, keys % self._block_n == 0, diagonal, bias.unit)
        found = self._of_queries.get(key) or self._prepare(key, tensors, strides_out, bias.unit)
        encode_k = encoders_of(found.build, self._templates, 1, k.shape, copied_strides("key", k.shape, k.stride()))
        encode_v = encoders_of(found.build, self._templates, 2, v.shape, copied_strides("value", v.shape, v.stride()))
        to_last = offset if self._right is None else keys - rows + self._right
        tail = (*bias.strides, heads, heads // heads_kv, rows, keys, to_last, *found.tail)
        describe = cached_descriptors((found.encode_q, encode_k, encode_v, found.encode_out))
        start, grid, left = found.build.launch, found.grid, self._left
        (of_out, of_lse), new = outputs_of(tensors, options, strides_out), allocator(q.is_cuda)
        default_scale, featured = q.shape[3] ** -0.5, any(one is not None for one in tensors[9:13])
        softcap, bias_at = options.softcap if self._capped else None, None if bias_ is None else bias_.data_ptr() & 15

        def launch(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result | None:
            q, k, v = tensors[0], tensors[1], tensors[2]
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:  # type: ignore[union-attr]  # never None
                return None
            sinks = slopes = bias = prefix = None
            if featured:
                sinks, slopes, bias, prefix = map(argument, tensors[9:13])
                if bias is not None and bias & 15 != bias_at:
                    return None
            if out is None:
                out = new(*of_out)
            if of_lse is not None and lse is None:
                lse = new(*of_lse)
            lse_at = None if lse is None else lse.data_ptr()
            values = (lse_at, default_scale if scale is None else scale, softcap, None, prefix, left)
            start(grid, *describe(q, k, v, out), *values, None, None, None, None, sinks, slopes, bias, *tail)
            return out, lse

        return launch

    def _prepare(self, key: Hashable, tensors: Tensors, strides_out: tuple[int, ...], bias_unit: int) -> _OfQueries:
        sizes, q, out_shape = shape_of(tensors, self._mask), tensors.q, (*tensors.q.shape[:3], tensors.v.shape[3])
        strides_q, strides_out = copied_strides("query", q.shape, q.stride()), copied_strides("out", out_shape, strides_out)
        grid, variant = grid_of(sizes, self._config, self._gpu), variant_of(sizes, self._config, self._gpu, bias_unit)
        build, constexprs = self._builds.get(variant) or self._build(variant)
        encode_q = encoders_of(build, self._templates, 0, q.shape, strides_q)
        encode_out = encoders_of(build, self._templates, 3, out_shape, strides_out)
        schedule = tiles_of_head(sizes, self._config), sizes.batch * sizes.heads, pair_rounds_of(sizes, self._config, grid[0])
        tail = (*schedule, *constexprs)
        made = self._of_queries[key] = _OfQueries(build, grid, encode_q, encode_out, tail)
        return made

    def _build(self, variant: Variant) -> tuple[Build, tuple[Any, ...]]:
        constexprs = tuple(constexprs_of(self._problem, self._config, variant, self._write_lse).values())
        lse = Pointer(torch.float32) if self._write_lse else None
        softcap = 0.5 if self._problem.features.softcap else None
        sizes = [1] * len(SIZES)  # no build depends on them
        more = placeholders(self._dtypes, variant.bias_unit)
        tiles = Pointer(torch.int32) if is_packed(self._problem) else None
        prefix = Pointer(torch.int32, 4) if self._problem.features.prefix else None
        left = None if self._left is None else 1
        cache = (Pointer(torch.int32, 4), 1, 1, 1) if self._problem.features.page else (None,) * 4
        arguments = (*self._templates, lse, 0.5, softcap, tiles, prefix, left, *cache, *more, *sizes, *constexprs)
        made = self._builds[variant] = Build(self._function, arguments, **self._options), constexprs
        return made


class FittedLauncher(Launcher):
    """The launchers of the configs that ``fitted`` chooses from: each call is bound to its own."""

    def __init__(self, function: Any, problem: AttentionProblem, config: Config, gpu: Gpu, *rest: Any) -> None:
        self._problem, self._config, self._gpu, self._made = problem, config, gpu, dict[Config, FwdLauncher]()
        self._of = lambda chosen: FwdLauncher(function, problem, chosen, gpu, *rest)

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        chosen = fitted(self._problem, shape_of(tensors, self._problem.mask), self._config, self._gpu)
        launcher = self._made.get(chosen)
        if launcher is None:
            launcher = self._made[chosen] = self._of(chosen)
        return launcher.bind(tensors, options, out)


class PackedLauncher(FwdLauncher):
    """The launcher for packed sequences, whose tiles another kernel lists first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lists: dict[tuple[bool, bool], Callable[..., None]] = {}

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        q, k = tensors.q, tensors.k
        assert tensors.cu_seqlens_q is not None
        if tensors.cu_seqlens_k is tensors.page_table is None:
            raise CannotServe("keys are in a cache without pages; of packed queries this kernel takes packed keys, or pages")
        batch, (_, heads, total, _), (_, heads_kv, keys, _) = tensors.cu_seqlens_q.shape[0] - 1, q.shape, k.shape
        rows = queries_of_tile(self._problem, self._config)
        listed = max_tiles(total, batch, rows)
        grid = packed_grid(listed * heads // heads_of_tile(self._problem), self._config, self._gpu)
        build, constexprs = self._builds.get(PACKED) or self._build(PACKED)
        describe = cached_descriptors(self._packed_encoders(build, tensors, out))
        sizes = (heads, heads // heads_kv, total, keys, self._right or 0, 0, batch * heads, 0)
        tail = (*bias_of(tensors).strides, *sizes, *constexprs)
        of_pages, left = _of_pages(tensors), self._left
        max_keys = 2**30 if tensors.page_table is None else tensors.page_table.shape[1] * keys
        kind = (tensors.cu_seqlens_k is not None, tensors.cache_seqlens is not None)
        start, list_tiles = build.launch, self._list(kind, rows)
        (of_out, of_lse), new = outputs_of(tensors, options, out_strides(tensors, out)), allocator(q.is_cuda)
        default_scale = q.shape[3] ** -0.5
        of_tiles, softcap = ((numbers(listed),), (1,), torch.float32), options.softcap if self._capped else None

        def launch(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result | None:
            q, k, v, cu_q, cu_k, used, table, _, _, sinks, slopes, _, prefix, *_ = tensors
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:  # type: ignore[union-attr]  # never None
                return None
            if out is None:
                out = new(*of_out)
            if of_lse is not None and lse is None:
                lse = new(*of_lse)
            tiles = new(*of_tiles)
            lengths = argument(cu_q), argument(cu_k), argument(used)
            list_tiles((batch + 1, 1, 1), argument(tiles), *lengths, batch, total, max_keys, listed)
            scale = default_scale if scale is None else scale
            values = (argument(lse), scale, softcap, argument(tiles), argument(prefix), left, argument(table), *of_pages)
            start(grid, *describe(q, k, v, out), *values, argument(sinks), argument(slopes), None, *tail)
            return out, lse

        return launch

    def _packed_encoders(self, build: Build, tensors: Tensors, out: torch.Tensor | None) -> tuple[Parts, ...]:
        q, k, v = tensors[:3]
        named = (
            ("query", q.shape, q.stride()),
            ("key", k.shape, k.stride()),
            ("value", v.shape, v.stride()),
            ("out", (*q.shape[:3], v.shape[3]), out_strides(tensors, out)),
        )
        return tuple(
            encoders_of(build, self._templates, n, *ragged(shape[1:], copied_strides(name, shape, strides)[1:]))
            for n, (name, shape, strides) in enumerate(named)
        )

    def _list(self, kind: tuple[bool, bool], rows: int) -> Callable[..., None]:
        made = self._lists.get(kind)
        if made is None:
            made = self._lists[kind] = list_of_tiles(rows, *kind, self._early_start)
        return made


def _of_pages(tensors: Tensors) -> tuple[int | None, int | None, int | None]:
    """From a sequence's entries of the table to the next's, and rows from page to page of K and of V. Raises CannotServe."""
    if tensors.page_table is None:
        return None, None, None
    return tensors.page_table.stride(0), _pitch("key", tensors.k), _pitch("value", tensors.v)


def _pitch(name: str, cache: torch.Tensor) -> int:
    of_page, _, of_row, _ = copied_strides(name, cache.shape, cache.stride())
    if of_page % of_row or cache.shape[0] * (of_page // of_row) >= MOST_ROWS:
        raise CannotServe(
            f"{name} has {cache.shape[0]} pages, {of_page} elements from one to the next and {of_row} from row to row; this "
            f"kernel needs whole rows from page to page, and under {MOST_ROWS} in all"
        )
    return of_page // of_row
