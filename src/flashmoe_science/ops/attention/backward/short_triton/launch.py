"""The launch of bwd_short_triton: bound once to shapes, strides and dtypes, then called with tensors."""

from __future__ import annotations

import torch

from flashmoe_science.ops.attention.backward.short_triton.config import NAMES, programs
from flashmoe_science.ops.attention.backward.short_triton.program import flashmoe_bwd_short_triton
from flashmoe_science.ops.attention.backward.tiled_triton.config import keys_first
from flashmoe_science.ops.attention.backward.tiled_triton.launch import TiledBackwardLauncher, is_wide
from flashmoe_science.ops.attention.call.backward import BackwardLaunch, Gradients, Saved, Wanted, gradients_like
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors
from flashmoe_science.ops.attention.device.launch import check_programs
from flashmoe_science.ops.attention.device.mask_triton import FAR, window_of
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import INTERPRETING, Pointer, allocator, argument, stride_unit


class ShortBackwardLauncher(TiledBackwardLauncher):
    """The kernel with a config; see BackwardLauncher. What is not wanted is not computed."""

    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        every, of_gradients = gradients_like(tensors, Wanted()), gradients_like(tensors, wanted)[:3]
        (batch, heads, rows, width), (_, heads_kv, keys, width_v) = tensors.q.shape, tensors.v.shape
        given = [one.stride()[:3] for one in (*tensors[:3], saved.dout, saved.out)]
        strides = (*given, *(one.strides[:3] for one in every if one is not None))
        steps = tuple(step for one in strides for step in one)
        left, right = window_of(self._problem, rows)
        of_keys, of_queries = programs(self._config, batch, heads, heads_kv, rows, keys)
        if wanted.dk is wanted.dv is False:
            of_keys = 0
        numbers = (*steps, heads_kv, heads // heads_kv, rows, keys, left, FAR if right is None else right, of_keys)
        *tiles, stages, warps = (self._config[name] for name in NAMES)
        constexprs = (
            width, width_v, padded_head_dim(width), padded_head_dim(width_v), *tiles, stages,
            right is not None, self._problem.mask == "causal-topleft", is_wide(strides, max(tiles)), stride_unit(steps),
            INTERPRETING, keys_first((*tiles[:2], warps, stages)),
        )  # fmt: skip
        made = [None if one is None else Pointer(tensors.q.dtype) for one in of_gradients]
        sums = Pointer(torch.float32)
        pointers = (*self._qkv, self._dout, self._out, sums, None if saved.dlse is None else sums, *made)
        build = self._build(flashmoe_bwd_short_triton, (*pointers, 0.5), numbers, constexprs, warps, 1)
        count = of_keys + (of_queries if wanted.dq else 0)
        check_programs(count)
        start = build.bound((count, 1, 1), *numbers, *constexprs) if count else None
        new = allocator(tensors.q.device.type == "cuda")

        def launch(tensors: Given, saved: Given, scale: float) -> Gradients:
            dq, dk, dv = (None if one is None else new(*one) for one in of_gradients)
            q, k, v, out, lse, dout, dlse = map(argument, (*tensors[:3], *saved))
            if start is not None:
                start(q, k, v, dout, out, lse, dlse, argument(dq), argument(dk), argument(dv), scale)
            return Gradients(dq, dk, dv, None, None)

        return launch
