"""The launches of fp32_gluon_sm90: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionLaunch, Launcher
from flashmoe_science.ops.attention.call.outputs import out_strides
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.device.launch import check_programs, launch_by_address
from flashmoe_science.ops.attention.device.sm90 import registers
from flashmoe_science.ops.attention.device.tma import Parts, descriptors_of, encoders_of
from flashmoe_science.ops.attention.forward.fp32_sm90.config import (
    PLANES,
    SIZES,
    Shapes,
    constexprs_of,
    grid_of,
    plane_blocks,
    plane_constexprs,
    plane_elements,
    row_elements,
    tile_rows,
    tile_shapes,
)
from flashmoe_science.ops.attention.forward.fp32_sm90.planes import PLANE_SIZES, flashmoe_fp32_planes
from flashmoe_science.ops.descriptors import template
from flashmoe_science.ops.launch import Build, Pointer, can_start_early, cdiv, stride_class, workspace_allocator


class _Builds(NamedTuple):
    """Builds of both kernels, for a class of strides."""

    planes: Build
    main: Build


class Fp32Launcher(Launcher):
    """The kernels with a config, for tensors of any lengths, batch and strides; all else as in the inputs that they were
    planned for. ``function``: the main kernel, to be built."""

    def __init__(self, function: Any, inputs: AttentionInputs, config: Config) -> None:
        if inputs.softmax_scale <= 0.0:
            raise CannotServe(f"softmax_scale is {inputs.softmax_scale}; this kernel needs it above 0")
        problem, self._function = inputs.problem, function
        self._problem, self._config, self._write_lse = problem, config, inputs.return_lse
        self._early = can_start_early(inputs.q.device)
        self._pointers = tuple(Pointer(torch.float32, one.data_ptr()) for one in (inputs.q, inputs.k, inputs.v))
        self._out = Pointer(torch.float32, 0 if inputs.out is None else inputs.out.data_ptr())
        tiles = tile_shapes(problem, config)
        self._templates = tuple(None if tile is None else template(tile, "bf16") for tile in tiles)
        self._of_planes = tuple(plane_constexprs(problem, self._early).values())
        self._of_main = tuple(constexprs_of(problem, config, self._early).values())
        self._builds: dict[Hashable, _Builds] = {}

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        q, k, v = tensors[:3]
        (batch, heads, rows, _), (_, heads_kv, keys, _) = q.shape, k.shape
        shapes = (q.shape, k.shape, v.shape)
        steps = tuple(step for one in (q, k, v) for step in one.stride()[:3])
        of_out = out_strides(tensors, out)
        out_steps = of_out[:3]
        grid, blocks = grid_of(batch * heads, rows, self._config), plane_blocks(batch * heads * rows, batch * heads_kv * keys)
        grid_planes = sum(blocks), 1, 1
        check_programs(grid[0], grid_planes[0])
        kind = (stride_class(steps), stride_class(out_steps))
        planes, main = self._builds.get(kind) or self._build(kind, steps, out_steps)
        encoders = self._encoders(main, shapes)
        offset = keys - rows if self._problem.mask == "causal" else 0
        numbers = (heads, heads // heads_kv, rows, keys, offset, cdiv(rows, tile_rows(self._config)))
        tail = (*out_steps, *numbers, *self._of_main)
        tail_planes = (*steps, heads, heads_kv, batch * heads, batch * heads_kv, rows, keys, *blocks[:2], *self._of_planes)
        take = workspace_allocator(True, [(elements, torch.bfloat16) for elements in plane_elements(self._problem, shapes)])

        def start(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float) -> None:
            workspace, *parts = take()
            planes.launch(grid_planes, q, k, v, *parts, *tail_planes)
            main.launch(grid, *descriptors_of(encoders, parts), out, lse, scale, *tail)

        return launch_by_address(start, tensors, options, of_out)

    def _encoders(self, main: Build, shapes: Shapes) -> tuple[Parts, ...]:
        """The encoders of the planes of tensors of these shapes."""
        dims, encoders = (self._problem.head_dim, self._problem.head_dim, self._problem.head_dim_v), []
        for n, ((batch, heads, rows, _), dim) in enumerate(zip(shapes, dims, strict=True)):
            shape = (PLANES.value, batch * heads, rows, row_elements(dim))
            strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
            encoders.append(encoders_of(main, self._templates, n, shape, strides))
        return tuple(encoders)

    def _build(self, kind: Hashable, steps: tuple[int, ...], of_out: tuple[int, ...]) -> _Builds:
        of_planes = (*self._pointers, *[Pointer(torch.bfloat16)] * 3, *steps, *[1] * len(PLANE_SIZES), *self._of_planes)
        lse = Pointer(torch.float32, 4) if self._write_lse else None
        of_main = (*self._templates, self._out, lse, 0.5, *of_out, *[1] * len(SIZES), *self._of_main)
        options = {"num_warps": 4, "launch_pdl": self._early}
        main = Build(self._function, of_main, maxnreg=registers(self._config), **options)
        planes = Build(flashmoe_fp32_planes, of_planes, **options)
        made = self._builds[kind] = _Builds(planes, main)
        return made
