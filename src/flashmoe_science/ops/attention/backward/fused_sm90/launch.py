"""The launches of bwd_fused_gluon_sm90: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

import torch

from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.backward.copied import (
    Bound,
    Builds,
    Shape,
    Start,
    encoded,
    encoders,
    fitting,
    is_unfit,
    shape_of,
)
from flashmoe_science.ops.attention.backward.fused_sm90.config import KEYS, QUERIES, WIDTH, heads_together
from flashmoe_science.ops.attention.backward.fused_sm90.finish import flashmoe_bwd_scaled_triton
from flashmoe_science.ops.attention.backward.fused_sm90.program import flashmoe_bwd_fused_gluon_sm90
from flashmoe_science.ops.attention.backward.split_sm90.config import Sizes, sizes_like
from flashmoe_science.ops.attention.backward.split_sm90.rows import bind_rows
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
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors
from flashmoe_science.ops.attention.device.sm90 import FAR, PRODUCER_REGISTERS
from flashmoe_science.ops.descriptors import template, vector
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
_REGISTERS, _CONSUMER_REGISTERS, _MULTIPLIER_REGISTERS = 128, 208, 72  # of a thread at launch, and of the warpgroups


def parts_of(rows: int) -> list[Part]:
    """The parts of the workspace of all query heads' rows: log-sum-exp as kernels read it, delta, dQ in fp32, counters."""
    return [*((one, torch.float32) for one in (rows, rows, rows * WIDTH)), (rows // QUERIES + 1, torch.int32)]


class FusedBackwardLauncher(BackwardLauncher):
    """The kernels with a config; see BackwardLauncher. Whatever is wanted, all three gradients are computed."""

    def __init__(self, inputs: BackwardInputs, config: Config) -> None:
        self._problem, self._config, self._builds = inputs.problem, config, Builds()
        dtype, rows = self._problem.dtype, vector(QUERIES)
        queries, keys = (template((1, 1, rows, WIDTH), dtype) for rows in (QUERIES, KEYS))
        sums = template((QUERIES, WIDTH), "fp32")
        self._templates = (queries, keys, keys, queries, rows, rows, keys, keys, sums)

    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        (batch, heads, rows, _), (_, heads_kv, keys, _) = tensors.q.shape, tensors.k.shape
        sizes = sizes_like(self._problem, self._config, batch, heads, heads_kv, rows, keys)
        of_dq, of_dk, of_dv, *_ = gradients_like(tensors, Wanted())
        assert of_dq is not None
        assert of_dk is not None
        assert of_dv is not None
        unfit = [is_unfit(one) for one in (*tensors[:3], saved.dout)]
        q, k, v, dout = fitting(unfit, (*tensors[:3], saved.dout))
        sum_rows = bind_rows(self._builds, saved._replace(dout=dout), sizes, None, Pointer(torch.int32))
        every = heads * batch * sizes.padded
        gradients = ((one.shape, one.strides) for one in (of_dk, of_dv))
        vectors = ((every,), (1,))
        shapes = (*map(shape_of, (q, k, v, dout)), vectors, vectors, *gradients, ((every, WIDTH), (WIDTH, 1)))
        fused, finish = self._bind_fused(sizes, shapes), self._bind_finish(of_dq, sizes)
        take, new = workspace_allocator(tensors.q.is_cuda, parts_of(every)), allocator(tensors.q.is_cuda)

        def launch(tensors: Given, saved: Given, scale: float) -> Gradients:
            dq, dk, dv = new(*of_dq), new(*of_dk), new(*of_dv)
            memory, lse, delta, sums, turns = take()  # kept alive until the last launch
            out, given_lse, dout, dlse = saved
            q, k, v, dout = fitting(unfit, (*tensors[:3], dout))
            sum_rows(*map(argument, (out, dout, given_lse, dlse)), None, None, lse, delta, None, turns)
            for start in fused.starts:
                start(*encoded(fused, (q, k, v, dout, lse, delta, dk, dv, sums)), turns, scale)
            finish(sums, argument(dq), scale)
            del memory
            return Gradients(dq if wanted.dq else None, dk if wanted.dk else None, dv if wanted.dv else None, None, None)

        return launch

    def _bind_fused(self, sizes: Sizes, shapes: tuple[Shape, ...]) -> Bound:
        masks = sizes.offset < FAR or sizes.seqlen_k % sizes.block_n > 0
        registers = (_CONSUMER_REGISTERS, _MULTIPLIER_REGISTERS, PRODUCER_REGISTERS)
        constexprs = (self._config["stages"], masks, *registers)
        arguments = (*self._templates, Pointer(torch.int32), 0.5, *(1,) * 8, *constexprs)
        build = self._builds.get(masks, flashmoe_bwd_fused_gluon_sm90, arguments, num_warps=4, maxnreg=_REGISTERS)
        heads, tiles_m = sizes.batch * sizes.heads_kv, sizes.padded // QUERIES
        numbers = (sizes.heads_kv, sizes.group, heads, heads_together(sizes))
        lengths = (sizes.seqlen_k, tiles_m, sizes.tiles, sizes.offset)
        start = build.bound((heads * sizes.tiles, 1, 1), *numbers, *lengths, *constexprs)
        return Bound([start], encoders(build, self._templates, shapes))

    def _bind_finish(self, of_dq: TensorLike, sizes: Sizes) -> Start:
        strides, heads = of_dq.strides[:3], sizes.heads_kv * sizes.group
        numbers = (*strides, heads, sizes.seqlen_q, sizes.padded, max(0, -sizes.offset))
        constexprs = (of_dq.shape[3], WIDTH, FINISH, stride_unit(strides))
        arguments = (Pointer(torch.float32), Pointer(of_dq.dtype), 0.5, *numbers, *constexprs)
        key = (stride_class(strides), constexprs)
        build = self._builds.get(key, flashmoe_bwd_scaled_triton, arguments, num_warps=FINISH_WARPS)
        return build.bound((sizes.padded // FINISH * heads * sizes.batch, 1, 1), *numbers, *constexprs)
