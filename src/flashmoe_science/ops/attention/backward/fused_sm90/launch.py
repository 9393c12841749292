"""The launches of bwd_fused_gluon_sm90: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.backward.copied import (
    Bound,
    Builds,
    Lengths,
    Start,
    encoded,
    encoders,
    fitting,
    is_unfit,
    kind_of,
    rows_as_copied,
    shape_of,
)
from flashmoe_science.ops.attention.backward.fused_sm90.config import width
from flashmoe_science.ops.attention.backward.fused_sm90.finish import flashmoe_bwd_scaled_triton
from flashmoe_science.ops.attention.backward.fused_sm90.program import flashmoe_bwd_fused_gluon_sm90
from flashmoe_science.ops.attention.backward.rows import bind_rows, bind_sinks
from flashmoe_science.ops.attention.backward.sizes import KEYS, Sizes, second_slices, sizes_like
from flashmoe_science.ops.attention.call.backward import (
    BackwardInputs,
    BackwardLaunch,
    BackwardLauncher,
    Gradients,
    Saved,
    Wanted,
    gradients_like,
)
from flashmoe_science.ops.attention.call.outputs import TensorLike
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors, sequences
from flashmoe_science.ops.attention.device.launch import element_pointer
from flashmoe_science.ops.attention.device.sm90 import FAR, PRODUCER_REGISTERS
from flashmoe_science.ops.descriptors import matrix, template, vector
from flashmoe_science.ops.launch import (
    Part,
    Pointer,
    allocator,
    argument,
    stride_class,
    stride_unit,
    workspace_allocator,
)

FINISH, FINISH_WARPS = 64, 4  # rows of a program that scales dQ
_REGISTERS = {64: (128, 208, 72), 128: (168, 240, 0)}  # of a thread at launch, of consumers and of the multiplier, by width


def parts_of(rows: int, columns: int, block_m: int, sequences: int) -> list[Part]:
    """The parts of the workspace of all query heads' rows: log-sum-exp as kernels read it, delta, what tiles add to the sinks'
    gradient, dQ in fp32, counters and the order of packed sequences (rows.py)."""
    order = 2 * (sequences + 1) if sequences else 0
    of_rows = ((one, torch.float32) for one in (rows, rows, rows // block_m, rows * columns))
    return [*of_rows, (rows // block_m + 1 + order, torch.int32)]


class FusedBackwardLauncher(BackwardLauncher):
    """The kernels with a config; see BackwardLauncher. Whatever is wanted, dQ, dK and dV are computed."""

    def __init__(self, inputs: BackwardInputs, config: Config) -> None:
        self._problem, self._config, self._builds = inputs.problem, config, Builds()
        dtype, block_m, self._width = self._problem.dtype, config["block_m"], width(self._problem)
        self._seconds = second_slices(self._problem)
        rows = vector(block_m)
        outer = (1, 1, 1) if self._problem.features.lengths == "packed" else (1, 1)
        queries, keys = (template((*outer, tile, self._width), dtype) for tile in (block_m, KEYS))
        sums = matrix(16 if self._seconds[0] else 32, 128)
        self._templates = (queries, keys, keys, queries, rows, rows, keys, keys, sums)

    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        (batch, heads, rows, _), (_, heads_kv, keys, _) = tensors.q.shape, tensors.k.shape
        packed = (0, 0) if tensors.cu_seqlens_q is None else (sequences(tensors), options.max_seqlen_q)
        sizes = sizes_like(self._problem, self._config, batch, heads, heads_kv, rows, keys, *packed)
        of_dq, of_dk, of_dv, *_ = gradients_like(tensors, Wanted())
        assert of_dq is not None
        assert of_dk is not None
        assert of_dv is not None
        of_sinks = gradients_like(tensors, wanted).dsinks
        unfit = [is_unfit(one) for one in (*tensors[:3], saved.dout)]
        given = fitting(unfit, (*tensors[:3], saved.dout))
        sinks = element_pointer(None if of_sinks is None else tensors.sinks)
        sum_rows = bind_rows(self._builds, saved._replace(dout=given[3]), sizes, sinks, Pointer(torch.int32))
        add_sinks = None if sinks is None else bind_sinks(self._builds, sinks, sizes, sizes.block_m)
        lengths = tuple(map(element_pointer, tensors[3:6]))
        fused = self._bind_fused(sizes, given, (of_dk, of_dv), lengths)
        finish = self._bind_finish(of_dq, sizes, lengths[0])
        parts = parts_of(heads * batch * sizes.padded, self._width, sizes.block_m, sizes.sequences)
        take, new = workspace_allocator(tensors.q.is_cuda, parts), allocator(tensors.q.is_cuda)
        banded = sizes.band > 0

        def launch(tensors: Given, saved: Given, scale: float) -> Gradients:
            dq, dk, dv = new(*of_dq), new(*of_dk), new(*of_dv)
            dsinks = None if of_sinks is None else new(*of_sinks)
            memory, lse, delta, partials, sums, turns = take()  # kept alive until the last launch
            out, given_lse, dout, dlse = saved
            q, k, v, dout = fitting(unfit, (*tensors[:3], dout))
            lengths = tuple(map(argument, tensors[3:6])) if packed[0] else (None, None, None)
            numbers = (*map(argument, (out, dout, given_lse, dlse)), *lengths[:2])
            if add_sinks is None:
                sum_rows(*numbers, None, lse, delta, None, turns)
            else:
                sum_rows(*numbers, argument(tensors[9]), lse, delta, partials, turns)
                add_sinks(partials, argument(dsinks))
            for start in fused.starts:
                start(*encoded(fused, (q, k, v, dout, lse, delta, dk, dv, sums)), turns, *lengths, scale)
            finish(sums, turns if banded else None, argument(dq), lengths[0], scale)
            del memory
            return Gradients(dq if wanted.dq else None, dk if wanted.dk else None, dv if wanted.dv else None, dsinks, None)

        return launch

    def _bind_fused(
        self, sizes: Sizes, given: Sequence[torch.Tensor], gradients: Sequence[TensorLike], lengths: Lengths
    ) -> Bound:
        masks = bool(sizes.offset < FAR or sizes.band or sizes.seqlen_k % sizes.block_n)
        at_launch, *registers = _REGISTERS[self._width]
        constexprs = (self._config["stages"], masks, sizes.band > 0, *registers, PRODUCER_REGISTERS, *self._seconds)
        of_band = sizes.of_band[1:]
        arguments = (*self._templates, Pointer(torch.int32), *lengths, 0.5, *(1,) * 7, *of_band, *constexprs)
        key = (masks, *kind_of(lengths))
        build = self._builds.get(key, flashmoe_bwd_fused_gluon_sm90, arguments, num_warps=4, maxnreg=at_launch)
        heads, tiles_m = sizes.batch * sizes.heads_kv, sizes.padded // sizes.block_m
        numbers = (sizes.heads_kv, sizes.group, heads)
        fixed = (sizes.seqlen_k, tiles_m, sizes.tiles, sizes.offset, *of_band)
        start = build.bound((heads * sizes.tiles, 1, 1), *numbers, *fixed, *constexprs)
        every = heads * sizes.group * sizes.padded
        vectors, sums = ((every,), (1,)), ((every * self._width // 128, 128), (128, 1))
        of_given = rows_as_copied(map(shape_of, given), sizes.sequences)
        of_gradients = rows_as_copied(((one.shape, one.strides) for one in gradients), sizes.sequences)
        return Bound([start], encoders(build, self._templates, (*of_given, vectors, vectors, *of_gradients, sums)))

    def _bind_finish(self, of_dq: TensorLike, sizes: Sizes, starts: Pointer | None) -> Start:
        strides, heads = of_dq.strides[:3], sizes.heads_kv * sizes.group
        counted = Pointer(torch.int32) if sizes.band else None
        unseen = None if sizes.band else max(0, -sizes.offset)
        numbers = (*strides, heads, sizes.seqlen_q, sizes.padded, unseen, sizes.sequences or None)
        constexprs = (of_dq.shape[3], self._width, FINISH, sizes.block_m, stride_unit(strides))
        pointers = (Pointer(torch.float32), counted, Pointer(of_dq.dtype), starts)
        key = (stride_class(strides), constexprs)
        arguments = (*pointers, 0.5, *numbers, *constexprs)
        build = self._builds.get(key, flashmoe_bwd_scaled_triton, arguments, num_warps=FINISH_WARPS)
        return build.bound((sizes.padded // FINISH * heads * sizes.batch, 1, 1), *numbers, *constexprs)
