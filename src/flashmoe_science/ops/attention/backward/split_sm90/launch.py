"""The launches of bwd_gluon_sm90: bound once to shapes and strides, then called with tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.backward.copied import (
    Bound,
    Builds,
    Lengths,
    Shape,
    encoded,
    encoders,
    fitting,
    is_unfit,
    kind_of,
    rows_as_copied,
    shape_of,
)
from flashmoe_science.ops.attention.backward.rows import ROWS, bind_rows, bind_sinks
from flashmoe_science.ops.attention.backward.sizes import KEYS, QUERIES, Sizes, second_slices, sizes_like, widths
from flashmoe_science.ops.attention.backward.split_sm90.keys import flashmoe_bwd_dkdv_gluon_sm90
from flashmoe_science.ops.attention.backward.split_sm90.queries import flashmoe_bwd_dq_gluon_sm90
from flashmoe_science.ops.attention.backward.split_sm90.waves import (
    Space,
    Wave,
    grids_of,
    space_of,
    waves_in_order,
    waves_of,
    waves_without_ds,
)
from flashmoe_science.ops.attention.call.backward import (
    BackwardInputs,
    BackwardLaunch,
    BackwardLauncher,
    Gradients,
    Outputs,
    Saved,
    Wanted,
    gradients_like,
)
from flashmoe_science.ops.attention.call.outputs import TensorLike
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors, sequences
from flashmoe_science.ops.attention.device.launch import element_pointer
from flashmoe_science.ops.attention.device.sm90 import FAR, PRODUCER_REGISTERS
from flashmoe_science.ops.descriptors import template, vector
from flashmoe_science.ops.launch import Part, Pointer, allocator, argument, workspace_allocator

_CONSUMER_REGISTERS, _REGISTERS = 240, 168  # of a consumer's thread, and at launch, of three warpgroups
_REGISTERS_OF_TWO = 128  # at launch of two warpgroups, of which two programs share a processor


def parts_of_rows(rows: int) -> list[Part]:
    """What the workspace has of all rows: the log-sum-exp as it is taken, delta, parts of the sinks' gradient."""
    return [(count, torch.float32) for count in (rows, rows, rows // ROWS)]


class SplitBackwardLauncher(BackwardLauncher):
    """The kernels with a config; see BackwardLauncher. What is not wanted is not computed, nor what only it needs: without dQ
    there is no workspace of dS."""

    def __init__(self, inputs: BackwardInputs, config: Config) -> None:
        gpu = current_gpu(inputs.tensors.q.device)
        assert gpu is not None  # or the kernel would not serve the problem
        problem = self._problem = inputs.problem
        self._config, self._sm_count = config, gpu.sm_count
        (of_qk, of_v), block_m = widths(problem), config["block_m"]
        self._seconds = second_slices(problem)
        outer = (1, 1, 1) if problem.features.lengths == "packed" else (1, 1)
        q, dout, k, v, dq = (
            template((*outer, *tile), problem.dtype)
            for tile in ((block_m, of_qk), (block_m, of_v), (KEYS, of_qk), (KEYS, of_v), (QUERIES, of_qk))
        )
        ds = template((KEYS, block_m), problem.dtype)
        rows = vector(block_m)
        self._of_keys, self._of_queries = (q, k, v, dout, rows, rows, ds, k, v), (ds, k, dq)
        self._builds = Builds()

    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        (batch, heads, rows, _), (_, heads_kv, keys, _) = tensors.q.shape, tensors.k.shape
        packed = (0, 0) if tensors.cu_seqlens_q is None else (sequences(tensors), options.max_seqlen_q)
        sizes = sizes_like(self._problem, self._config, batch, heads, heads_kv, rows, keys, *packed)
        every = gradients_like(tensors, wanted)
        waves = waves_of(sizes, self._sm_count) if wanted.dq else waves_without_ds(sizes)
        space, each = space_of(waves, sizes), waves_in_order(waves, sizes) if any(wanted[:3]) else []
        space = space if wanted.dq else space._replace(ds=0)
        space = space if wanted.dk or wanted.dv else space._replace(dk=0, dv=0)
        unfit = [is_unfit(one) for one in (*tensors[:3], saved.dout)]
        q, k, v, dout = fitting(unfit, (*tensors[:3], saved.dout))
        sinks = element_pointer(None if every.dsinks is None else tensors.sinks)
        sum_rows = bind_rows(self._builds, saved._replace(dout=dout), sizes, sinks)
        add_sinks = None if sinks is None else bind_sinks(self._builds, sinks, sizes, ROWS)
        lengths = tuple(map(element_pointer, tensors[3:6]))
        of_keys = self._bind_keys((q, k, v, dout), lengths, every, sizes, space, each)
        of_queries = None if every.dq is None else self._bind_queries(k, lengths, every.dq, sizes, space, each)
        of_wave = [(space.ds, tensors.q.dtype), *((count, torch.float32) for count in space[1:])]
        parts = [*parts_of_rows(batch * heads * sizes.padded), *of_wave]
        take, new = workspace_allocator(tensors.q.is_cuda, parts), allocator(tensors.q.is_cuda)
        cap = options.softcap if self._problem.features.softcap else None
        keeps = [count > 0 for count in space[1:]]

        def launch(tensors: Given, saved: Given, scale: float) -> Gradients:
            made = Gradients(*(None if one is None else new(*one) for one in every))
            memory, lse, delta, partials, ds, *kept = take()  # kept alive until the last launch
            dk_kept, dv_kept, dq_kept = (one if needed else None for one, needed in zip(kept, keeps, strict=True))
            out, given_lse, dout, dlse = saved
            q, k, v, dout = fitting(unfit, (*tensors[:3], dout))
            lengths = tuple(map(argument, tensors[3:6])) if packed[0] else (None, None, None)
            numbers = (*map(argument, (out, dout, given_lse, dlse)), lengths[0], None)
            if add_sinks is None:
                sum_rows(*numbers, None, lse, delta, None, None)
            else:
                sum_rows(*numbers, argument(tensors[9]), lse, delta, partials, None)
                add_sinks(partials, argument(made.dsinks))
            given = (q, k, v, dout, lse, delta, ds, made.dk, made.dv)
            first = (*encoded(of_keys, given), dk_kept, dv_kept, *lengths, scale, cap)
            second = () if of_queries is None else (*encoded(of_queries, (ds, k, made.dq)), dq_kept, *lengths, scale)
            for number, start_keys in enumerate(of_keys.starts):
                start_keys(*first)
                if of_queries is not None:
                    of_queries.starts[number](*second)
            del memory
            return made

        return launch

    def _bind_keys(
        self, given: Sequence[torch.Tensor], lengths: Lengths, every: Outputs, sizes: Sizes, space: Space, each: list[Wave]
    ) -> Bound:
        masks = bool(sizes.offset < FAR or sizes.band or sizes.seqlen_k % sizes.block_n)
        of_program = (self._config["consumers"], self._config["stages"], masks)
        constexprs = (*of_program, _CONSUMER_REGISTERS, PRODUCER_REGISTERS, *self._seconds)
        kept = (Pointer(torch.float32),) * 2 if space.dk else (None, None)
        of_ds = _tiles_of(space, sizes) if space.ds else None
        gradients = [None if one is None else (one.shape, one.strides) for one in every[1:3]]
        absent = tuple([one is None for one in (of_ds, *gradients)])
        templates = (*self._of_keys[:6], *(None if no else one for no, one in zip(absent, self._of_keys[6:], strict=True)))
        of_band = sizes.of_band
        cap = 0.5 if self._problem.features.softcap else None
        arguments = (*templates, *kept, *lengths, 0.5, cap, *(1,) * 10, *of_band, *constexprs)
        key, options = (masks, space.dk > 0, absent, *kind_of(lengths)), {"num_warps": 4, "maxnreg": _REGISTERS}
        build = self._builds.get(key, flashmoe_bwd_dkdv_gluon_sm90, arguments, **options)
        fixed = (sizes.heads_kv, sizes.group, sizes.seqlen_k, sizes.padded // sizes.block_m, sizes.offset)
        starts, unit = [], sizes.band or 1
        for wave in each:
            steps = (wave.first_step // unit, (wave.first_step + wave.steps) // unit)
            numbers = (wave.first_head, *steps, wave.first_tile, wave.tiles)
            starts.append(build.bound(grids_of(wave, sizes)[0], *fixed, *numbers, *of_band, *constexprs))
        sums = ((sizes.batch * sizes.heads_kv * sizes.group * sizes.padded,), (1,))
        rows, of_gradients = (rows_as_copied(some, sizes.sequences) for some in (map(shape_of, given), gradients))
        return Bound(starts, encoders(build, templates, (*rows, sums, sums, of_ds, *of_gradients)))

    def _bind_queries(
        self, k: torch.Tensor, lengths: Lengths, of_dq: TensorLike, sizes: Sizes, space: Space, each: list[Wave]
    ) -> Bound:
        warps = self._config["warps_dq"]
        constexprs = (warps, self._config["stages_dq"], sizes.block_n, PRODUCER_REGISTERS, self._seconds[0])
        kept, of_band = Pointer(torch.float32) if space.dq else None, sizes.of_band
        arguments = (*self._of_queries, kept, *lengths, 0.5, *(1,) * 10, *of_band, *constexprs)
        options = {"num_warps": warps, "maxnreg": _REGISTERS_OF_TWO if warps == 4 else _REGISTERS}
        build = self._builds.get((space.dq > 0, *kind_of(lengths)), flashmoe_bwd_dq_gluon_sm90, arguments, **options)
        fixed = (sizes.heads_kv, sizes.group, sizes.seqlen_k, sizes.padded // QUERIES, sizes.offset)
        starts = []
        for wave in each:
            keys = (wave.first_tile * sizes.block_n, (wave.first_tile + wave.tiles) * sizes.block_n)
            numbers = (wave.first_head, sizes.queries(wave.first_step) // QUERIES, *keys, wave.tiles)
            starts.append(build.bound(grids_of(wave, sizes)[1], *fixed, *numbers, *of_band, *constexprs))
        shapes = (_tiles_of(space, sizes), *rows_as_copied((shape_of(k), (of_dq.shape, of_dq.strides)), sizes.sequences))
        return Bound(starts, encoders(build, self._of_queries, shapes))


def _tiles_of(space: Space, sizes: Sizes) -> Shape:
    """The workspace of dS: rows of a tile of queries, of one tile after another."""
    return (space.ds // sizes.block_m, sizes.block_m), (sizes.block_m, 1)
