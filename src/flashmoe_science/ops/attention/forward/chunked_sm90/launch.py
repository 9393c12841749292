"""The launches of chunk_gluon_sm90.py and of its merge: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.inputs import (
    AttentionInputs,
    AttentionOutput,
    BoundLaunch,
    KnownLaunch,
    Launcher,
    Shapes,
)
from flashmoe_science.ops.attention.call.results import results_of, shapes_of_results
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.device.tma import are_aligned, check_copied, copied_strides, describer, encoders_of
from flashmoe_science.ops.attention.forward.chunked_sm90.config import (
    LAST_SIZES,
    Variant,
    compared,
    constexprs_of,
    span_of,
    splits_for,
    tile_shapes,
    window_of,
    work_of,
)
from flashmoe_science.ops.attention.forward.prefill_sm90.config import registers
from flashmoe_science.ops.attention.forward.splitkv.config import partial_bytes
from flashmoe_science.ops.attention.front.append_fallback import Append
from flashmoe_science.ops.attention.problem.features import Extras
from flashmoe_science.ops.descriptors import template
from flashmoe_science.ops.launch import Build, Grid, Pointer, allocator, argument, can_start_early, stride_class


class _Started(NamedTuple):
    """A build of the main kernel, the templates of its descriptors, and the constexprs that end its arguments."""

    build: Build
    templates: tuple[TensorDescriptor | None, ...]
    constexprs: tuple[Any, ...]


# (q, k, v, out, lse, the partials, the modes' tensors, softmax_scale, softcap)
_Launch = Callable[[Any, Any, Any, Any, Any, Any, tuple[Any, ...], float, float | None], None]


class _Call(NamedTuple):
    """What a launch is bound to beside its plan. ``seqlen_k``: the capacity, past which nothing is read; ``most_keys``: the
    most that a sequence has, for the number of splits; ``stride_table``: entries from a sequence's pages to the next's; shapes
    of Q, K and V, and strides of them and of O."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    most_keys: int
    stride_lse: int
    stride_table: int
    shapes: Shapes
    strides: Shapes


class ChunkLauncher(Launcher):
    """The kernels with a config, for tensors of any lengths, batch and strides; all else as in the inputs that they were
    planned for. As SplitLauncher: ``bind`` for problems without modes, ``bind_inputs`` with any. ``function``: the
    main kernel, to be built."""

    def __init__(self, function: Any, inputs: AttentionInputs, config: Config) -> None:
        check_copied(inputs)
        gpu = current_gpu(inputs.q.device)
        assert gpu is not None
        self._function, self._problem, self._config, self._gpu = function, inputs.problem, config, gpu
        self._early, self._write_lse = can_start_early(inputs.q.device), inputs.return_lse
        self._out = Pointer(inputs.q.dtype, 0 if inputs.out is None else inputs.out.data_ptr())
        self._lse = Pointer(torch.float32, 4) if inputs.return_lse else None
        x = inputs.extras
        self._tensors = tuple(None if one is None else Pointer(one.dtype, 4) for one in _tensors(x))
        self._options = {"num_warps": 4, "maxnreg": registers(config), "launch_pdl": self._early}
        self._builds: dict[Variant, _Started] = {}
        self._merges: dict[tuple[Any, ...], Callable[..., None]] = {}

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        """The launch of a problem without modes, for tensors of such shapes and strides."""
        (batch, heads, rows, _), (_, heads_kv, keys, _), _ = shapes
        call = _Call(batch, heads, heads_kv, rows, keys, keys, rows, 0, shapes, strides)
        launch, floats = self._bind(call, 0)
        none = (None,) * len(self._tensors)
        new = allocator(on_gpu=True)

        def bound(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
        ) -> None:
            partials = new((floats,), (1,), torch.float32) if floats else None
            launch(q, k, v, argument(out), argument(lse), argument(partials), none, scale, None)

        return bound

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        """The call of inputs of the same shapes, strides and most lengths as these."""
        launch, floats = self._bind_call(inputs, num_splits)
        results, capped = results_of(inputs, floats), bool(self._problem.modes.softcap)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            out, lse, partials = results(inputs.out)
            tensors = tuple([argument(one) for one in _tensors(inputs.extras)])
            of_heads = (argument(out), argument(lse), argument(partials))
            softcap = inputs.extras.softcap if capped else None
            launch(inputs.q, inputs.k, inputs.v, *of_heads, tensors, inputs.softmax_scale, softcap)
            return AttentionOutput(out, lse)

        return bound

    def bind_known(
        self, inputs: AttentionInputs, num_splits: int, append: Append | None, tokens_first: bool = True
    ) -> KnownLaunch | None:
        """The call of tensors like these, without a look at them; None where something is appended, or each call says a length
        of all sequences."""
        x = inputs.extras
        if append is not None or x.cache_seqlens is x.cu_seqlens_k is None:
            return None
        launch, floats = self._bind_call(inputs, num_splits)
        results, scale = results_of(inputs, floats, tokens_first), inputs.softmax_scale
        softcap = x.softcap if self._problem.modes.softcap else None

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            q, k, v, cu_q, cu_k, seqlens, table, places, _, sinks, *_ = tensors
            if not are_aligned(q, k, v):
                return None
            out, lse, partials = results(None)
            of_heads = (argument(out), argument(lse), argument(partials))
            of_modes = tuple([argument(one) for one in (cu_q, cu_k, seqlens, places, table, sinks)])
            launch(q, k, v, *of_heads, of_modes, scale if softmax_scale is None else softmax_scale, softcap)
            return out, lse

        return run

    def _bind_call(self, inputs: AttentionInputs, num_splits: int) -> tuple[_Launch, int]:
        """``_bind`` for inputs with modes."""
        q, k, v, x, out = inputs.q, inputs.k, inputs.v, inputs.extras, inputs.out
        (batch, heads, rows, _), (_, heads_kv, capacity, _) = q.shape, k.shape
        seqlen_q = rows
        if x.cu_seqlens_q is not None:
            batch, seqlen_q = x.cu_seqlens_q.shape[0] - 1, x.max_seqlen_q
        stride_table = 0
        if x.page_table is not None:
            capacity, stride_table = x.page_table.shape[1] * capacity, x.page_table.stride(0)
        most_keys = x.max_seqlen_k if x.cu_seqlens_k is not None else min(capacity, x.max_seqlen_k or capacity)
        strides = (q.stride(), k.stride(), v.stride(), shapes_of_results(inputs)[1] if out is None else out.stride())
        shapes = (q.shape, k.shape, v.shape)
        call = _Call(batch, heads, heads_kv, seqlen_q, capacity, most_keys, rows, stride_table, shapes, strides)
        return self._bind(call, num_splits)

    def _bind(self, call: _Call, num_splits: int) -> tuple[_Launch, int]:
        """The launch of such a call, and how many numbers its partials are."""
        config, group = self._config, call.heads // call.heads_kv
        span = span_of(self._problem, group, call.seqlen_q, config)
        work = work_of(call.batch * call.heads_kv, group, call.seqlen_q, call.most_keys, config, span)
        splits = splits_for(work, config, self._gpu, num_splits)
        programs, all_rows = work.heads * work.tiles_m, call.batch * call.heads * call.seqlen_q
        if max(programs, all_rows) >= 2**31:
            raise CannotServe(f"it takes {max(programs, all_rows)} programs; a launch may have {2**31 - 1}")
        of_q, of_k, of_v, of_out = call.strides
        of_q = copied_strides("query", call.shapes[0], of_q)
        packed = self._tensors[0] is not None
        strides_out = (0 if packed else of_out[0], of_out[1], of_out[2])
        batches = compared(self._problem, call.batch, programs * splits, config, self._gpu)
        variant = Variant(group, splits > 1, self._write_lse, batches, stride_class(strides_out))
        started = self._builds.get(variant) or self._build(variant, strides_out)
        rows_q, total_q = call.shapes[0][0], call.shapes[0][2]
        shape_q = (rows_q, call.heads_kv, group, total_q, self._problem.head_dim)
        describe = describer(
            (
                encoders_of(started.build, started.templates, 0, shape_q, (of_q[0], of_q[1] * group, *of_q[1:])),
                encoders_of(started.build, started.templates, 1, call.shapes[1], copied_strides("key", call.shapes[1], of_k)),
                encoders_of(started.build, started.templates, 2, call.shapes[2], copied_strides("value", call.shapes[2], of_v)),
            )
        )
        numbers = (*strides_out, call.stride_lse, call.heads_kv, call.seqlen_q, call.seqlen_k, splits, all_rows)
        tail = (*window_of(self._problem), *numbers, call.stride_table, call.batch, *started.constexprs)
        grid = (programs, splits, 1)
        if splits == 1:
            return partial(_launch_one, started.build.launch, grid, describe, tail), 0
        merge, constexprs = self._merge(variant, splits, strides_out)
        merge_grid = (chunk_merge.programs(all_rows, self._problem.head_dim_v), 1, 1)
        merge_tail = (*strides_out, call.stride_lse, call.heads_kv, call.seqlen_q, splits, all_rows, *constexprs)
        floats = partial_bytes(all_rows, splits, self._problem.head_dim_v) // 4
        launch = partial(_launch_two, started.build.launch, grid, describe, tail, merge, merge_grid, merge_tail)
        return launch, floats

    def _build(self, variant: Variant, strides_out: tuple[int, ...]) -> _Started:
        problem, config = self._problem, self._config
        tiles = tile_shapes(problem, config, variant.group)
        templates = tuple(None if tile is None else template(tile, problem.dtype) for tile in tiles)
        constexprs = tuple(constexprs_of(problem, config, variant, self._early).values())
        partials = Pointer(torch.float32) if variant.split else None
        pointers = (self._out, self._lse, partials, *self._tensors)
        numbers = (0.5, 0.5 if problem.modes.softcap else None, *window_of(problem), *strides_out, *[1] * len(LAST_SIZES))
        arguments = (*templates, *pointers, *numbers, *constexprs)
        build = Build(self._function, arguments, **self._options)
        made = self._builds[variant] = _Started(build, templates, constexprs)
        return made

    def _merge(self, variant: Variant, splits: int, strides: tuple[int, ...]) -> tuple[Callable[..., None], tuple[Any, ...]]:
        constexprs = tuple(chunk_merge.constexprs(variant.group, self._problem.head_dim_v, splits, self._early).values())
        key = (variant.strides, constexprs)
        launch = self._merges.get(key)
        if launch is None:
            launch = chunk_merge.build(
                self._out, self._lse, self._tensors[0], self._tensors[-1], strides, constexprs, self._early
            )
            self._merges[key] = launch
        return launch, constexprs


def _tensors(x: Extras) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a call's modes as the kernel takes them: the packed queries' first, the sinks last."""
    return x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.cache_batch_idx, x.page_table, x.sinks


def _launch_one(
    start: Callable[..., None], grid: Grid, describe: Callable[..., tuple[Any, ...]], tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, tensors: tuple[Any, ...], scale: float, softcap: float | None,
) -> None:  # fmt: skip
    start(grid, *describe(q, k, v), out, lse, None, *tensors, scale, softcap, *tail)


def _launch_two(
    start: Callable[..., None], grid: Grid, describe: Callable[..., tuple[Any, ...]], tail: tuple[Any, ...],
    merge: Callable[..., None], merge_grid: Grid, merge_tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, tensors: tuple[Any, ...], scale: float, softcap: float | None,
) -> None:  # fmt: skip
    start(grid, *describe(q, k, v), out, lse, partials, *tensors, scale, softcap, *tail)
    merge(merge_grid, partials, out, lse, tensors[0], tensors[-1], *merge_tail)
