"""The launches of bwd_gluon_sm90: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.backward.split_sm90.config import (
    KEYS,
    QUERIES,
    ROWS,
    ROWS_WARPS,
    Sizes,
    Wave,
    Waves,
    grids_of,
    kept_rows,
    sizes_of,
    space_rows,
    
    waves_in_order, waves_of,
    widths,
)
from flashmoe_science.ops.attention.backward.split_sm90.keys import flashmoe_bwd_dkdv_gluon_sm90
from flashmoe_science.ops.attention.backward.split_sm90.queries import flashmoe_bwd_dq_gluon_sm90
from flashmoe_science.ops.attention.backward.split_sm90.rows import flashmoe_bwd_rows_triton
from flashmoe_science.ops.attention.call.backward import (
    BackwardInputs,
    BackwardLaunch,
    BackwardLauncher,
    Gradients,
    Saved,
    Wanted,
    gradients_like,
)
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors
from flashmoe_science.ops.attention.device.sm90 import PRODUCER_REGISTERS
from flashmoe_science.ops.attention.device.tma import copied_strides
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.descriptors import template, vector
from flashmoe_science.ops.launch import (
    Build,
    Encoder,
    Pointer,
    allocator,
    argument,
    cdiv,
    stride_class,
    stride_unit,
    workspace_allocator,
)

_Start = Callable[..., None]
_Shape = tuple[tuple[int, ...], tuple[int, ...]]  # with strides
_CONSUMER_REGISTERS, _REGISTERS = 240, 168  # of a consumer's thread, and at launch, of three warpgroups
_REGISTERS_OF_TWO = 128  # at launch of two warpgroups, of which two programs share a processor


class _Bound(NamedTuple):
    """The launch of a kernel for each wave, and the encoders of its descriptors."""

    starts: list[_Start]
    encoders: tuple[Encoder, ...]


class SplitBackwardLauncher(BackwardLauncher):
    """The kernels with a config; see BackwardLauncher. Whatever is wanted, dK and dV are computed."""

    def __init__(self, inputs: BackwardInputs, config: Config, gpu: Gpu) -> None:
        problem = self._problem = inputs.problem
        self._config, self._sm_count = config, gpu.sm_count
        (of_qk, of_v), block_m = widths(problem), config["block_m"]
        q, dout, k, v, ds, dq = (
            template(tile, problem.dtype)
            for tile in (
                (1, 1, block_m, of_qk), (1, 1, block_m, of_v), (1, 1, KEYS, of_qk), (1, 1, KEYS, of_v), (KEYS, block_m),
                (1, 1, QUERIES, of_qk),
            )
        )  # fmt: skip
        rows = vector(block_m)
        self._of_keys, self._of_queries = (q, k, v, dout, rows, rows, ds, k, v), (ds, k, dq)
        self._out, self._dout = (Pointer(one.dtype, one.data_ptr()) for one in (inputs.saved.out, inputs.saved.dout))
        self._builds: dict[Hashable, Build] = {}

    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        (batch, heads, rows, _), (_, heads_kv, keys, _) = tensors.q.shape, tensors.k.shape
        sizes, (of_qk, of_v) = sizes_of(self._problem, batch, heads_kv, rows, keys), widths(self._problem)
        waves = waves_of(sizes, self._config, of_qk + of_v, self._sm_count)
        each, every = waves_in_order(waves, sizes), gradients_like(tensors, Wanted())
        copies = not _is_copied(saved.dout)
        dout = _contiguous(saved.dout) if copies else saved.dout
        sum_rows = self._bind_rows(saved._replace(dout=dout), sizes)
        of_keys = self._bind_keys(tensors, dout, sizes, waves, each)
        of_queries = self._bind_queries(tensors, sizes, waves, each)
        on_gpu, sums = tensors.q.is_cuda, batch * heads * sizes.padded
        kept = kept_rows(waves, sizes, self._config)
        parts = [(sums, torch.float32), (sums, torch.float32), (space_rows(waves, sizes, self._config) * self._config["block_m"], tensors.q.dtype)]
        parts += [(kept * of_qk, torch.float32), (kept * of_v, torch.float32)]
        take, new, with_dq = workspace_allocator(on_gpu, parts), allocator(on_gpu), wanted.dq

        def launch(tensors: Given, saved: Given, scale: float) -> Gradients:
            dq, dk, dv = (new(*one) for one in every[:3] if one is not None)
            held, lse, delta, ds, *states = take()
            q, k, v = tensors[:3]
            out, given_lse, dout, dlse = saved
            assert dout is not None
            if copies:
                dout = _contiguous(dout)
            sum_rows(argument(out), argument(dout), argument(given_lse), argument(dlse), lse, delta)
            first, second = _encoded(of_keys, (q, k, v, dout, lse, delta, ds, dk, dv)), _encoded(of_queries, (ds, k, dq))
            more = states if kept else (None, None)
            for start_keys, start_queries in zip(of_keys.starts, of_queries.starts, strict=True):
                start_keys(*first, *more, scale)
                if with_dq:
                    start_queries(*second, scale)
            del held
            return Gradients(*(one if asked else None for one, asked in zip((dq, dk, dv), wanted, strict=False)), None, None)

        return launch

    def _bind_rows(self, saved: Saved, sizes: Sizes) -> _Start:
        of_out, of_dout = saved.out.stride()[:3], saved.dout.stride()[:3]
        width = self._problem.head_dim_v
        constexprs = (width, padded_head_dim(width), ROWS, stride_unit((*of_out, *of_dout)))
        heads = sizes.heads_kv * sizes.group
        numbers = (*of_out, *of_dout, heads, sizes.seqlen_q, sizes.padded)
        sums = Pointer(torch.float32)
        pointers = (self._out, self._dout, sums, None if saved.dlse is None else sums, sums, sums)
        key = (saved.dlse is None, stride_class(numbers), constexprs)
        build = self._build(key, flashmoe_bwd_rows_triton, (*pointers, *numbers, *constexprs), num_warps=ROWS_WARPS)
        return build.bound((sizes.padded // ROWS * heads * sizes.batch, 1, 1), *numbers, *constexprs)

    def _bind_keys(
        self, tensors: Tensors, dout: torch.Tensor, sizes: Sizes, waves: Waves, each: list[Wave]
    ) -> _Bound:
        config = self._config
        masks = self._problem.causal or sizes.seqlen_k % (KEYS * config["consumers"]) > 0
        constexprs = (config["consumers"], config["stages"], masks, _CONSUMER_REGISTERS, PRODUCER_REGISTERS)
        kept = (Pointer(torch.float32),) * 2 if waves.banded else (None, None)
        warps = 4 if config["consumers"] == 2 else 8
        arguments = (*self._of_keys, *kept, 0.5, *(1,) * 8, *constexprs)
        build = self._build(
            ("keys", masks, waves.banded), flashmoe_bwd_dkdv_gluon_sm90, arguments, num_warps=warps, maxnreg=_REGISTERS
        )
        tiles_m = sizes.padded // config["block_m"]
        starts = []
        for wave in each:
            grid, _ = grids_of(wave, sizes, config)
            last = (wave.first_head, wave.first_step, wave.end_step)
            starts.append(build.bound(grid, sizes.heads_kv, sizes.group, sizes.seqlen_k, tiles_m, sizes.offset, *last, *constexprs))
        sums = ((sizes.batch * sizes.heads_kv * sizes.group * sizes.padded,), (1,))
        every = gradients_like(tensors, Wanted())
        shapes = (
            *(_copied(name, one) for name, one in zip(("query", "key", "value"), tensors[:3], strict=True)),
            _copied("the gradient of the output", dout), sums, sums, self._space(waves, sizes),
            *((one.shape, one.strides) for one in every[1:3] if one is not None),
        )  # fmt: skip
        return _Bound(starts, _encoders(build, self._of_keys, shapes))

    def _bind_queries(self, tensors: Tensors, sizes: Sizes, waves: Waves, each: list[Wave]) -> _Bound:
        config = self._config
        warps, block_n = config["warps_dq"], KEYS * config["consumers"]
        constexprs = (warps, config["stages_dq"], block_n, PRODUCER_REGISTERS)
        registers = _REGISTERS_OF_TWO if warps == 4 else _REGISTERS
        arguments = (*self._of_queries, 0.5, *(1,) * 8, *constexprs)
        build = self._build("queries", flashmoe_bwd_dq_gluon_sm90, arguments, num_warps=warps, maxnreg=registers)
        starts, unit = [], QUERIES // config["block_m"]
        for wave in each:
            _, grid = grids_of(wave, sizes, config)
            numbers = (
                sizes.heads_kv, sizes.group, sizes.seqlen_k, sizes.padded // QUERIES, cdiv(sizes.seqlen_k, block_n), sizes.offset,
                wave.first_head, wave.first_step // unit,
            )  # fmt: skip
            starts.append(build.bound(grid, *numbers, *constexprs))
        dq = gradients_like(tensors, Wanted()).dq
        assert dq is not None
        shapes = (self._space(waves, sizes), _copied("key", tensors.k), (dq.shape, dq.strides))
        return _Bound(starts, _encoders(build, self._of_queries, shapes))

    def _space(self, waves: Waves, sizes: Sizes) -> _Shape:
        block_m = self._config["block_m"]
        return (space_rows(waves, sizes, self._config), block_m), (block_m, 1)

    def _build(self, key: Hashable, function: Any, arguments: tuple[Any, ...], **options: Any) -> Build:
        build = self._builds.get(key)
        if build is None:
            build = self._builds[key] = Build(function, arguments, **options)
        return build


def _encoders(build: Build, templates: tuple[Any, ...], shapes: tuple[_Shape, ...]) -> tuple[Encoder, ...]:
    every = zip(templates, shapes, strict=True)
    return tuple(build.encoder(index, one, *shape) for index, (one, shape) in enumerate(every))


def _encoded(bound: _Bound, tensors: tuple[Any, ...]) -> list[Any]:
    """The descriptors of tensors as a launch takes them."""
    return [value for encode, one in zip(bound.encoders, tensors, strict=True) for value in encode(one)]


def _copied(name: str, tensor: torch.Tensor) -> _Shape:
    """The shape and strides of a tensor as copies of 16 bytes take it. Raises CannotServe."""
    if tensor.data_ptr() % 16:
        raise CannotServe(f"{name} does not start at a multiple of 16 bytes; its copies need that")
    shape = tuple(tensor.shape)
    return shape, copied_strides(name, shape, tensor.stride())


def _is_copied(tensor: torch.Tensor) -> bool:
    """Whether copies of 16 bytes take a tensor as it is."""
    try:
        return bool(_copied("it", tensor))
    except CannotServe:
        return False


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as of an expanded gradient."""
    return tensor.clone(memory_format=torch.contiguous_format)
