"""The launches of chunk_gluon_sm90.py and of its merge: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionLaunch, Launcher
from flashmoe_science.ops.attention.call.outputs import Result, out_strides, outputs_of
from flashmoe_science.ops.attention.call.tensors import Given, MaybeTensor, Options, Tensors, max_keys, sequences
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.device.launch import check_programs, element_pointer
from flashmoe_science.ops.attention.device.sm90 import registers, window_of
from flashmoe_science.ops.attention.device.splits import partial_bytes
from flashmoe_science.ops.attention.device.tma import Parts, cached_descriptors, check_copied, copied_strides, encoders_of
from flashmoe_science.ops.attention.forward.chunked_sm90.config import (
    LAST_SIZES,
    Variant,
    compared,
    constexprs_of,
    span_of,
    splits_for,
    tile_shapes,
    work_of,
)
from flashmoe_science.ops.descriptors import template
from flashmoe_science.ops.launch import Build, Pointer, allocator, argument, can_start_early, stride_class


class _Started(NamedTuple):
    """A build of the main kernel, the templates of its descriptors, and the constexprs that end its arguments."""

    build: Build
    templates: tuple[TensorDescriptor | None, ...]
    constexprs: tuple[Any, ...]


class _Kernels(NamedTuple):
    """What launches a call."""

    describe: Callable[..., tuple[Any, ...]]  # the descriptors of Q, K and V
    start: Callable[..., None]  # (descriptors, out, lse, the partials, the features' tensors, softmax_scale)
    merge: Callable[..., None] | None  # (the partials, out, lse, cu_seqlens_q, sinks); None where keys are not split
    floats: int  # numbers of the partials


class ChunkLauncher(Launcher):
    """The kernels with a config; see Launcher. ``function``: the main kernel, to be built."""

    splits_keys = True

    def __init__(self, function: Any, inputs: AttentionInputs, config: Config) -> None:
        check_copied(inputs)
        gpu = current_gpu(inputs.q.device)
        assert gpu is not None
        self._function, self._problem, self._config, self._gpu = function, inputs.problem, config, gpu
        self._early, self._write_lse = can_start_early(inputs.q.device), inputs.return_lse
        self._out = Pointer(inputs.q.dtype, 0 if inputs.out is None else inputs.out.data_ptr())
        self._lse = Pointer(torch.float32, 4) if inputs.return_lse else None
        self._tensors = tuple(map(element_pointer, _features(inputs.tensors)))
        self._options = {"num_warps": 4, "maxnreg": registers(config), "launch_pdl": self._early}
        self._builds: dict[Variant, _Started] = {}
        self._merges: dict[tuple[Any, ...], Build] = {}

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        describe, start, merge, floats = self._kernels(tensors, options, out)
        (of_out, of_lse), new = outputs_of(tensors, options, out_strides(tensors, out)), allocator(tensors.q.is_cuda)
        default_scale, of_partials = tensors.q.shape[3] ** -0.5, ((floats,), (1,), torch.float32)
        nothing = (None,) * len(self._tensors)

        def launch(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result | None:
            q, k, v = tensors[0], tensors[1], tensors[2]
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:  # type: ignore[union-attr]  # never None
                return None
            if out is None:
                out = new(*of_out)
            if of_lse is not None and lse is None:
                lse = new(*of_lse)
            partials = new(*of_partials) if floats else None
            features = nothing if len(tensors) == 3 else tuple([argument(one) for one in _features(tensors)])
            scale = default_scale if scale is None else scale
            out_at, lse_at, partials_at = argument(out), argument(lse), argument(partials)
            start(*describe(q, k, v), out_at, lse_at, partials_at, *features, scale)
            if merge is not None:
                merge(partials_at, out_at, lse_at, features[0], features[-1])
            return out, lse

        return launch

    def _kernels(self, tensors: Tensors, options: Options, out: torch.Tensor | None) -> _Kernels:
        q, k = tensors[:2]
        config, problem, (_, heads, total_q, _), (_, heads_kv, capacity, _) = self._config, self._problem, q.shape, k.shape
        batch, group = sequences(tensors), heads // heads_kv
        packed, table = tensors.cu_seqlens_q is not None, tensors.page_table
        seqlen_q = options.max_seqlen_q if packed else total_q
        stride_table = 0 if table is None else table.stride(0)
        capacity = capacity if table is None else table.shape[1] * capacity  # nothing is read past it
        span = span_of(problem, group, seqlen_q, config)
        work = work_of(batch * heads_kv, group, seqlen_q, max_keys(tensors, options), config, span)
        splits = splits_for(work, config, self._gpu, options.num_splits)
        programs, all_rows = work.heads * work.tiles_m, batch * heads * seqlen_q
        check_programs(programs, all_rows)
        of_out = out_strides(tensors, out)
        strides_out = (0 if packed else of_out[0], of_out[1], of_out[2])
        batches = compared(problem, batch, programs * splits, config, self._gpu)
        variant = Variant(group, splits > 1, self._write_lse, batches, stride_class(strides_out))
        started = self._builds.get(variant) or self._build(variant, strides_out)
        describe = cached_descriptors(self._encoders(started, tensors))
        sizes = (*strides_out, total_q, heads_kv, seqlen_q, capacity, splits, all_rows)
        softcap = options.softcap if problem.features.softcap else None
        tail = (softcap, *window_of(problem), *sizes, stride_table, batch, *started.constexprs)
        start = started.build.bound((programs, splits, 1), *tail)
        if splits == 1:
            return _Kernels(describe, start, None, 0)
        merge, constexprs = self._merge(variant, splits, strides_out)
        merge_grid = (chunk_merge.programs(all_rows, problem.head_dim_v), 1, 1)
        merge_tail = (*strides_out, total_q, heads_kv, seqlen_q, splits, all_rows, *constexprs)
        floats = partial_bytes(all_rows, splits, problem.head_dim_v) // 4
        return _Kernels(describe, start, merge.bound(merge_grid, *merge_tail), floats)

    def _encoders(self, started: _Started, tensors: Tensors) -> tuple[Parts, ...]:
        """The encoders of Q as [batch, heads_kv, group, seqlen, head_dim], of K and of V."""
        q, k, v = tensors[:3]
        (rows_q, heads, total_q, width), heads_kv = q.shape, k.shape[1]
        group, of_q = heads // heads_kv, copied_strides("query", q.shape, q.stride())
        shape_q, strides_q = (rows_q, heads_kv, group, total_q, width), (of_q[0], of_q[1] * group, *of_q[1:])
        build, templates = started.build, started.templates
        return (
            encoders_of(build, templates, 0, shape_q, strides_q),
            encoders_of(build, templates, 1, k.shape, copied_strides("key", k.shape, k.stride())),
            encoders_of(build, templates, 2, v.shape, copied_strides("value", v.shape, v.stride())),
        )

    def _build(self, variant: Variant, strides_out: tuple[int, ...]) -> _Started:
        problem, config = self._problem, self._config
        tiles = tile_shapes(problem, config, variant.group)
        templates = tuple(None if tile is None else template(tile, problem.dtype) for tile in tiles)
        constexprs = tuple(constexprs_of(problem, config, variant, self._early).values())
        partials = Pointer(torch.float32) if variant.split else None
        pointers = (self._out, self._lse, partials, *self._tensors)
        numbers = (0.5, 0.5 if problem.features.softcap else None, *window_of(problem), *strides_out, *[1] * len(LAST_SIZES))
        arguments = (*templates, *pointers, *numbers, *constexprs)
        build = Build(self._function, arguments, **self._options)
        made = self._builds[variant] = _Started(build, templates, constexprs)
        return made

    def _merge(self, variant: Variant, splits: int, strides: tuple[int, ...]) -> tuple[Build, tuple[Any, ...]]:
        constexprs = tuple(chunk_merge.constexprs(variant.group, self._problem.head_dim_v, splits, self._early).values())
        key = (variant.strides, constexprs)
        if key not in self._merges:
            self._merges[key] = chunk_merge.build(
                self._out, self._lse, self._tensors[0], self._tensors[-1], strides, constexprs, self._early
            )
        return self._merges[key], constexprs


def _features(tensors: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The Tensors that the kernel takes, in its order: the packed queries' first, the sinks last."""
    _, _, _, cu_q, cu_k, seqlens, table, batch_idx, _, sinks, *_ = tensors
    return cu_q, cu_k, seqlens, batch_idx, table, sinks
