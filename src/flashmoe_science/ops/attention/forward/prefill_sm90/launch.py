"""The launches of fwd_gluon_sm90.py: bound once to shapes and strides, then called with tensors; of packed sequences too."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.inputs import (
    AttentionInputs,
    AttentionOutput,
    BoundLaunch,
    KnownLaunch,
    Launcher,
    Shapes,
    Sizes,
    output_strides,
    sizes_of,
)
from flashmoe_science.ops.attention.call.results import results_of, shapes_of_results
from flashmoe_science.ops.attention.device.bias import NO_BIAS, BiasOf, bias_of, stand_ins
from flashmoe_science.ops.attention.device.tma import Parts, are_aligned, copied_strides, describer, encoders_of
from flashmoe_science.ops.attention.forward.prefill_sm90.config import (
    EVEN,
    PACKED,
    ROWS,
    SIZES,
    Variant,
    constexprs_of,
    grid_of,
    heads_of_tile,
    is_packed,
    packed_grid,
    pair_rounds_of,
    queries_of_tile,
    registers,
    tile_shapes,
    tiles_of_head,
    variant_of,
    window_of,
)
from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import list_of_tiles, most_tiles, numbers
from flashmoe_science.ops.attention.front.append_fallback import Append
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.descriptors import MOST_ROWS, ragged, template
from flashmoe_science.ops.launch import Build, Grid, Pointer, argument
from flashmoe_science.ops.plan import Cache


class _OfQueries(NamedTuple):
    """What of a launch stays as it is while a cache of keys and values grows."""

    build: Build
    grid: Grid
    encode_q: Parts
    encode_out: Parts
    tail: tuple[Any, ...]  # the kernel's arguments after ``causal_offset``


class FwdLauncher(Launcher):
    """A length costs the host what depends on it, and no more. ``bind`` is for problems without modes, ``bind_inputs`` for
    those with modes too, whose values each call has. ``function``: the kernel, to be built. ``dtypes``: of sinks, slopes and
    bias, None for none."""

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
        self._capped = bool(problem.modes.softcap)

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        """The call of inputs of the same shapes and strides as these. Raises CannotServe."""
        launch, results = self._bind_call(inputs, num_splits), results_of(inputs, 0)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            (out, lse, _), x = results(inputs.out), inputs.extras
            more = (argument(x.sinks), argument(x.alibi_slopes), argument(x.bias), argument(x.prefix))
            softcap = x.softcap if self._capped else None
            launch(inputs.q, inputs.k, inputs.v, out, lse, inputs.softmax_scale, softcap, *more)
            return AttentionOutput(out, lse)

        return bound

    def bind_known(
        self, inputs: AttentionInputs, num_splits: int, append: Append | None, tokens_first: bool = True
    ) -> KnownLaunch:
        """The call of tensors like these, without a look at them. Raises CannotServe."""
        assert append is None  # where nothing is cached nothing is appended
        launch, results = self._bind_call(inputs, num_splits), results_of(inputs, 0, tokens_first)
        scale, bias = inputs.softmax_scale, inputs.extras.bias
        softcap, of_bias = inputs.extras.softcap if self._capped else None, 0 if bias is None else bias.data_ptr() & 15

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            q, k, v, _, _, _, _, _, _, sinks, slopes, bias, *_ = tensors
            if not are_aligned(q, k, v) or (bias is not None and bias.data_ptr() & 15 != of_bias):
                return None
            out, lse, _ = results(None)
            more = (argument(sinks), argument(slopes), argument(bias))
            launch(q, k, v, out, lse, scale if softmax_scale is None else softmax_scale, softcap, *more)
            return out, lse

        return run

    def _bind_call(self, inputs: AttentionInputs, num_splits: int) -> Callable[..., None]:
        """``_bind`` for inputs with modes."""
        _check_splits(num_splits)
        q, k, v, out = inputs.q, inputs.k, inputs.v, inputs.out
        of_out = output_strides(q, v.shape[3]) if out is None else out.stride()
        shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride(), of_out)
        return self._bind(shapes, strides, bias_of(inputs.extras))

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        return self._bind(shapes, strides, NO_BIAS)

    def _bind(self, shapes: Shapes, strides: Shapes, bias: BiasOf) -> Callable[..., None]:
        shape_q, shape_k, shape_v = shapes
        of_q, of_k, of_v, of_out = strides
        (_, heads, rows, _), (_, heads_kv, keys, _) = shape_q, shape_k
        offset = keys - rows if self._mask == "causal" else 0
        even = offset >= EVEN * rows
        key = (shape_q, of_q, of_out, keys % self._block_n == 0, self._causal and (even, offset % ROWS == 0), bias.unit)
        found = self._of_queries.get(key) or self._prepare(key, shapes, of_q, of_out, bias.unit)
        build, grid, encode_q, encode_out, tail = found
        encode_k = encoders_of(build, self._templates, 1, shape_k, copied_strides("key", shape_k, of_k))
        encode_v = encoders_of(build, self._templates, 2, shape_v, copied_strides("value", shape_v, of_v))
        to_last = offset if self._right is None else keys - rows + self._right
        numbers = (*bias.strides, heads, heads // heads_kv, rows, keys, to_last, *tail)
        return _bound(build.launch, grid, (encode_q, encode_k, encode_v, encode_out), self._left, numbers)

    def _prepare(
        self, key: Hashable, shapes: Shapes, of_q: tuple[int, ...], of_out: tuple[int, ...], bias_unit: int
    ) -> _OfQueries:
        sizes, shape_out = sizes_of(shapes, self._mask), (*shapes[0][:3], shapes[2][3])
        strides_q, strides_out = copied_strides("query", shapes[0], of_q), copied_strides("out", shape_out, of_out)
        grid, variant = grid_of(sizes, self._config, self._gpu), variant_of(sizes, self._config, self._gpu, bias_unit)
        build, constexprs = self._builds.get(variant) or self._build(variant)
        encode_q = encoders_of(build, self._templates, 0, shapes[0], strides_q)
        encode_out = encoders_of(build, self._templates, 3, shape_out, strides_out)
        tail = (*_schedule(sizes, self._config, grid[0]), *constexprs)
        made = self._of_queries[key] = _OfQueries(build, grid, encode_q, encode_out, tail)
        return made

    def _build(self, variant: Variant) -> tuple[Build, tuple[Any, ...]]:
        constexprs = tuple(constexprs_of(self._problem, self._config, variant, self._write_lse).values())
        lse = Pointer(torch.float32) if self._write_lse else None
        softcap = 0.5 if self._problem.modes.softcap else None
        sizes = [1] * len(SIZES)  # no build depends on them
        more = stand_ins(self._dtypes, variant.bias_unit)
        tiles = Pointer(torch.int32) if is_packed(self._problem) else None
        prefix = Pointer(torch.int32, 4) if self._problem.modes.prefix else None
        left = None if self._left is None else 1
        cache = (Pointer(torch.int32, 4), 1, 1, 1) if self._problem.modes.page else (None,) * 4
        arguments = (*self._templates, lse, 0.5, softcap, tiles, prefix, left, *cache, *more, *sizes, *constexprs)
        made = self._builds[variant] = Build(self._function, arguments, **self._options), constexprs
        return made


def _check_splits(num_splits: int) -> None:
    if num_splits > 1:
        raise CannotServe(f"num_splits is {num_splits}; this kernel never splits keys")


# (q, k, v and out as tensors; the addresses of lse, the list of tiles, cu_seqlens_q, cu_seqlens_k, seqused_k, the page table,
# prefix, sinks and slopes; softmax_scale, softcap)
_PackedLaunch = Callable[..., None]


class PackedLauncher(FwdLauncher):
    """The launcher for packed sequences, whose tiles another kernel lists first: ``bind_inputs`` and ``bind_known`` alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lists: dict[tuple[bool, bool], Callable[..., None]] = {}

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        _check_splits(num_splits)
        launch, listed = self._bind_packed(inputs)
        results = results_of(inputs, listed)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            x = inputs.extras
            out, lse, tiles = results(inputs.out)
            lengths = (x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.page_table)
            of_call = [argument(one) for one in (lse, tiles, *lengths, x.prefix, x.sinks, x.alibi_slopes)]
            launch(inputs.q, inputs.k, inputs.v, out, *of_call, inputs.softmax_scale, x.softcap if self._capped else None)
            return AttentionOutput(out, lse)

        return bound

    def bind_known(
        self, inputs: AttentionInputs, num_splits: int, append: Append | None, tokens_first: bool = True
    ) -> KnownLaunch:
        """The call of tensors like these, without a look at them. Raises CannotServe."""
        assert append is None  # nothing is appended to packed keys
        _check_splits(num_splits)
        launch, listed = self._bind_packed(inputs)
        results, scale = results_of(inputs, listed, tokens_first), inputs.softmax_scale
        softcap = inputs.extras.softcap if self._capped else None

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            q, k, v, cu_q, cu_k, used, table, _, _, sinks, slopes, *_ = tensors
            if not are_aligned(q, k, v):
                return None
            out, lse, tiles = results(None)
            of_call = [argument(one) for one in (lse, tiles, cu_q, cu_k, used, table, None, sinks, slopes)]
            launch(q, k, v, out, *of_call, scale if softmax_scale is None else softmax_scale, softcap)
            return out, lse

        return run

    def _bind_packed(self, inputs: AttentionInputs) -> tuple[_PackedLaunch, int]:
        """The launch of tensors of such shapes and strides, and how many numbers the list of tiles is. Raises CannotServe."""
        q, k, v, extras = inputs.q, inputs.k, inputs.v, inputs.extras
        assert extras.cu_seqlens_q is not None
        if extras.cu_seqlens_k is extras.page_table is None:
            raise CannotServe("keys are in a cache without pages; of packed queries this kernel takes packed keys, or pages")
        batch, (_, heads, total, _), (_, heads_kv, keys, _) = extras.cu_seqlens_q.shape[0] - 1, q.shape, k.shape
        rows = queries_of_tile(self._problem, self._config)
        listed = most_tiles(total, batch, rows)
        grid = packed_grid(listed * heads // heads_of_tile(self._problem), self._config, self._gpu)
        build, constexprs = self._builds.get(PACKED) or self._build(PACKED)
        of_out = shapes_of_results(inputs)[1] if inputs.out is None else inputs.out.stride()
        tensors = (
            ("query", q.shape, q.stride()),
            ("key", k.shape, k.stride()),
            ("value", v.shape, v.stride()),
            ("out", (*q.shape[:3], v.shape[3]), of_out),
        )
        encoders = tuple(
            encoders_of(build, self._templates, n, *ragged(shape[1:], copied_strides(name, shape, strides)[1:]))
            for n, (name, shape, strides) in enumerate(tensors)
        )
        numbers_of_heads = (heads, heads // heads_kv, total, keys, self._right or 0, 0, batch * heads, 0)
        tail = (*bias_of(extras).strides, *numbers_of_heads, *constexprs)
        left, most_keys, of_pages = self._left, 2**30, _of_pages(inputs)
        if extras.page_table is not None:
            most_keys = extras.page_table.shape[1] * keys
        kind = (extras.cu_seqlens_k is not None, extras.cache_seqlens is not None)
        describe, start, list_tiles, list_grid = describer(encoders), build.launch, self._list(kind, rows), (batch, 1, 1)

        def launch(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: Any, tiles: Any, cu_q: Any, cu_k: Any,
            used: Any, table: Any, prefix: Any, sinks: Any, slopes: Any, scale: float, softcap: float | None,
        ) -> None:  # fmt: skip
            list_tiles(list_grid, tiles, cu_q, cu_k, used, batch, most_keys, listed)
            descriptors = describe(q, k, v, out)
            start(grid, *descriptors, lse, scale, softcap, tiles, prefix, left, table, *of_pages, sinks, slopes, None, *tail)

        return launch, numbers(listed)

    def _list(self, kind: tuple[bool, bool], rows: int) -> Callable[..., None]:
        made = self._lists.get(kind)
        if made is None:
            made = self._lists[kind] = list_of_tiles(rows, *kind, self._early_start)
        return made


def _of_pages(inputs: AttentionInputs) -> tuple[int | None, int | None, int | None]:
    """From a sequence's entries of the table to the next's, and rows from page to page of K and of V. Raises CannotServe."""
    table = inputs.extras.page_table
    if table is None:
        return None, None, None
    return table.stride(0), _pitch("key", inputs.k), _pitch("value", inputs.v)


def _pitch(name: str, cache: torch.Tensor) -> int:
    of_page, _, of_row, _ = copied_strides(name, cache.shape, cache.stride())
    if of_page % of_row or cache.shape[0] * (of_page // of_row) >= MOST_ROWS:
        raise CannotServe(
            f"{name} has {cache.shape[0]} pages, {of_page} elements from one to the next and {of_row} from row to row; this "
            f"kernel needs whole rows from page to page, and under {MOST_ROWS} in all"
        )
    return of_page // of_row


def _schedule(sizes: Sizes, config: Config, programs: int) -> tuple[int, int, int]:
    """The kernel's last three integers: tiles_m, heads_all and pair_rounds."""
    return tiles_of_head(sizes, config), sizes.batch * sizes.heads, pair_rounds_of(sizes, config, programs)


def _bound(
    launch: Callable[..., None], grid: Grid, encoders: tuple[Parts, ...], left: int | None, tail: tuple[Any, ...]
) -> Callable[..., None]:
    describe = describer(encoders)

    def bound(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float,
        softcap: float | None = None, sinks: Any = None, slopes: Any = None, bias: Any = None, prefix: Any = None,
    ) -> None:  # fmt: skip
        lse_address = None if lse is None else lse.data_ptr()
        values = (lse_address, scale, softcap, None, prefix, left, None, None, None, None, sinks, slopes, bias)
        launch(grid, *describe(q, k, v, out), *values, *tail)

    return bound
