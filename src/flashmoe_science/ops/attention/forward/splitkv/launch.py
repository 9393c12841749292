"""The launches of split_triton.py and of its merge: bound once to shapes, strides and dtypes, then called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionLaunch, Launcher
from flashmoe_science.ops.attention.call.outputs import Result, out_strides, outputs_of
from flashmoe_science.ops.attention.call.tensors import Given, MaybeTensor, Options, Tensors, max_keys, sequences
from flashmoe_science.ops.attention.device import merge_triton
from flashmoe_science.ops.attention.device.launch import alignment_mask, check_programs, element_pointer
from flashmoe_science.ops.attention.device.mask_triton import FAR, window_of
from flashmoe_science.ops.attention.device.softmax_triton import PLAIN_SUM
from flashmoe_science.ops.attention.forward.splitkv.config import (
    NO_NEW,
    OfNew,
    Splits,
    Variant,
    constexprs_of,
    lengths_differ,
    main_grid,
    min_tiles,
    occupancy,
    partials_of,
    rounded_keys,
    slots_of,
    span_of,
    splits_for,
    work_of,
)
from flashmoe_science.ops.attention.problem import KEY_CLASS
from flashmoe_science.ops.cache import MAX_CALLS, Cache
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Build,
    Pointer,
    address,
    allocator,
    argument,
    can_start_early,
    next_power_of_2,
    stride_class,
    stride_unit,
)

_MOST_NEW = 16  # rows of a sequence that the kernel appends
_FEATURES, _NEW = 12, 5  # tensors of features, and of what is appended
_ABSENT = (None,) * (_FEATURES + _NEW)
_Started = tuple[Build, tuple[Any, ...]]  # a build, and the constexprs that end its arguments


class _Kernels(NamedTuple):
    """What launches a call."""

    start: Callable[..., None]  # (q, k, v, out, lse, the partials, all other tensors, softmax_scale, softcap, keys, of_keys)
    merge: Callable[..., None] | None  # (the partials, out, lse, sinks, three of lengths, keys, capacity); None without splits
    floats: int  # numbers of the partials


class _Sizes(NamedTuple):
    """What a launch is bound to besides its plan: sizes and strides. ``of_keys``: three strides of K, three of V, and the
    capacity, past which nothing is read. ``keys``: the most keys that a sequence has here, for the number of splits."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    keys: int
    stride_lse: int
    of_keys: tuple[int, ...]
    strides: tuple[int, ...]  # of Q and O, three each
    stride_bias: tuple[int, ...]
    stride_table: int
    stride_slopes: int
    stride_scales: tuple[int, ...]  # of k_scale and v_scale
    of_new: OfNew


class SplitLauncher(Launcher):
    """The kernels with a config; see Launcher. ``function``: the main kernel, to be built."""

    any_keys = splits_keys = takes_length = appends = True

    def __init__(self, function: Any, inputs: AttentionInputs, config: Config) -> None:
        self._function, problem = function, inputs.problem
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            if tensor.stride(3) != 1 and tensor.shape[3] != 1:
                raise CannotServe(f"{name} has stride {tensor.stride(3)} in its last dimension; it must be 1")
        device = inputs.q.device
        gpu = gpu_of(inputs.q)
        self._problem, self._config, self._on_gpu = problem, config, device.type == "cuda"
        self._sm_count = 4 if gpu is None else gpu.sm_count
        self._early = not INTERPRETING and can_start_early(device)
        self._scale_first, self._write_lse = inputs.softmax_scale <= 0.0, inputs.return_lse
        of_out = Pointer(inputs.q.dtype, 0 if inputs.out is None else inputs.out.data_ptr())
        of_inputs = tuple(Pointer(one.dtype, one.data_ptr()) for one in (inputs.q, inputs.k, inputs.v))
        of_lse = Pointer(torch.float32, 4) if inputs.return_lse else None
        self._pointers = (*of_inputs, of_out, of_lse)
        bias = inputs.tensors.bias
        bias_at = 0 if bias is None else bias.data_ptr()
        self._features = tuple(element_pointer(one, bias_at if one is bias else 4) for one in inputs.tensors.of_features())
        self._builds: dict[tuple[Any, ...], _Started] = {}  # by Variant
        self._merges: dict[tuple[Any, ...], _Started] = {}  # by warps and constexprs
        self._kernels: Cache[Hashable, _Kernels] = Cache(MAX_CALLS)
        self._block_m, self._block_n, self._ragged = config["block_m"], config["block_n"], problem.features.lengths != "equal"
        self._uneven = lengths_differ(problem) and inputs.tensors.cache_seqlens is not None

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        """The launch; of sequences of one length without a bias it is for any number of keys."""
        sizes = _sizes_of(tensors, options, out)
        if tensors.new_k is not None:
            self._check_new(tensors, sizes)
        kernels = self._bind(sizes, options)
        (of_out, of_lse), new = outputs_of(tensors, options, out_strides(tensors, out)), allocator(self._on_gpu)
        default_scale, must_align = tensors.q.shape[3] ** -0.5, alignment_mask(tensors)
        bias_at = 0 if tensors.bias is None else tensors.bias.data_ptr() & 15
        of_keys, capacity, in_cache = sizes.of_keys, sizes.of_keys[6], tensors.cache_seqlens is not None
        grows = not self._ragged and all(one is None for one in (tensors.bias, tensors.prefix, tensors.k_scale))
        by_keys: Cache[tuple[int, bool], _Kernels] = Cache(MAX_CALLS)
        by_keys[-(-capacity // KEY_CLASS), capacity % self._block_n == 0] = kernels
        softcap = float(options.softcap)

        def launch(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result | None:
            q, k, v, *rest = [None if one is None else address(one) for one in tensors]
            others = tuple(rest) if rest else _ABSENT
            if must_align and ((q | k | v | (others[12] or 0) | (others[13] or 0)) & 15 or (others[8] or 0) & 15 != bias_at):
                return None
            (start, merge, floats), before, mine = kernels, 0 if in_cache else min(length, capacity), of_keys
            if grows:
                before = tensors[1].shape[2]  # type: ignore[union-attr]  # never None
                mine = (*of_keys[:6], before)
                start, merge, floats = by_keys.get((-(-before // KEY_CLASS), before % block_n == 0)) or kernels_for(before)
            if out is None:
                out = new(*of_out)
            if of_lse is not None and lse is None:
                lse = new(*of_lse)
            partials = new((floats,), (1,), torch.float32) if floats else None
            scale = default_scale if scale is None else scale
            out_at, lse_at, partials_at = address(out), argument(lse), argument(partials)
            start(q, k, v, out_at, lse_at, partials_at, *others, scale, softcap, before, *mine)
            if merge is not None:
                merge(partials_at, out_at, lse_at, others[6], others[0], others[2], others[5], before, mine[6])
            return out, lse

        block_n = self._block_n

        def kernels_for(keys: int) -> _Kernels:
            made = self._bind(sizes._replace(keys=keys, of_keys=(*of_keys[:6], keys)), options)
            by_keys[-(-keys // KEY_CLASS), keys % block_n == 0] = made
            return made

        return launch

    def _check_new(self, tensors: Tensors, sizes: _Sizes) -> None:
        """Raise CannotServe unless one program alone reads the keys that it writes."""
        assert tensors.new_k is not None
        assert tensors.new_v is not None
        rows, new = sizes.seqlen_q * sizes.heads // sizes.heads_kv, tensors.new_k.shape[2]
        if rows > self._block_m or not 0 < new <= _MOST_NEW:
            raise CannotServe(f"appends up to {_MOST_NEW} keys for up to {self._block_m} rows, not {new} for {rows}")
        if any(one.data_ptr() & 15 for one in (*tensors[:3], tensors.new_k, tensors.new_v)):
            raise CannotServe("a tensor does not start at a multiple of 16 bytes")

    def _splits(self, batch: int, heads_kv: int, rows: int, keys: int, seqlen_q: int, num_splits: int) -> tuple[int, Splits]:
        """Tiles of rows of each key head of a sequence, and into how many splits their keys are split."""
        config = self._config
        work = work_of(batch * heads_kv, rows, keys, config, span_of(self._problem, seqlen_q, config))
        asked = num_splits or config["num_splits"]
        per_sm, uneven = occupancy(self._problem, config, work), batch if self._uneven else 1
        return work.tiles_m, splits_for(work, self._block_n, min_tiles(config), asked, self._sm_count, per_sm, uneven)

    def _bind(self, sizes: _Sizes, options: Options) -> _Kernels:
        """The _Kernels of tensors of these sizes."""
        (*of_kv, seqlen_k), (_, qh, qm, _, oh, om), new = sizes.of_keys, sizes.strides, sizes.of_new
        steps, reach = (*of_kv, *sizes.strides), max(self._block_m, self._block_n, sizes.heads // sizes.heads_kv)
        ends, compensated = self._ragged or seqlen_k % self._block_n != 0, self._write_lse and sizes.keys > PLAIN_SUM
        wide = max(qm, om, of_kv[2], of_kv[5], qh, oh) * reach >= 2**30
        of_steps = stride_class((*steps, *sizes.stride_bias, *new.strides))
        kinds = (ends, wide, compensated, stride_unit(steps), new.constexprs, new.pointers, of_steps)
        # All that the launch depends on: with a cache that grows it is found again for KEY_CLASS tokens.
        key = (options.num_splits, sizes._replace(keys=rounded_keys(sizes.keys), of_keys=()), kinds)
        kernels = self._kernels.get(key)
        if kernels is None:
            kernels = self._kernels[key] = self._bind_class(*key, sizes.of_keys)
        return kernels

    def _bind_class(self, num_splits: int, sizes: _Sizes, kinds: tuple[Any, ...], of_keys: tuple[int, ...]) -> _Kernels:
        """``_bind`` of all sizes that are alike, and ``kinds`` of Variant; ``of_keys`` are those of one of them."""
        batch, heads, heads_kv, seqlen_q, keys, stride_lse, _, strides, of_bias, of_table, of_slopes, of_scales, new = sizes
        group, all_heads, (left, right) = heads // heads_kv, batch * heads_kv, window_of(self._problem, seqlen_q)
        tiles_m, chosen = self._splits(batch, heads_kv, seqlen_q * group, keys, seqlen_q, num_splits)
        splits, batches, ordered, ranges, *even = chosen
        programs, rows = all_heads * tiles_m, all_heads * seqlen_q * group
        check_programs(programs, rows)
        variant = Variant(group, tiles_m == 1, splits > 1, ranges > 0, ordered, batches, right is not None, *kinds)
        all_rows = rows // batch if ranges else rows  # that have places of partials
        numbers = (
            *strides, stride_lse, of_table, of_slopes, *of_bias, *of_scales, *new.strides, heads_kv, seqlen_q, splits, ranges,
            batch, *even, left, FAR if right is None else right, all_rows, *new.sizes,
        )  # fmt: skip
        build, constexprs = self._builds.get(variant) or self._build(variant, (2, *of_keys, *numbers))
        start = build.bound(main_grid(chosen, programs, batch), *numbers, *constexprs)
        if max(splits, ranges) == 1:
            return _Kernels(start, None, 0)
        warps = merge_triton.merge_warps(rows, self._sm_count)
        merge, constexprs = self._merge(merge_triton.Merged(group, splits, ranges, batches), warps)
        places = slots_of(chosen, batch)
        merge_tail = (
            *strides[3:], stride_lse, heads_kv, seqlen_q, splits, places, batch, *even, all_rows, new.sizes[0],
            *constexprs,
        )  # fmt: skip
        floats = partials_of(chosen, batch, rows, self._problem.head_dim_v) // 4
        merge_grid = merge_triton.merge_grid(rows, self._problem.head_dim_v, warps)
        return _Kernels(start, merge.bound(merge_grid, *merge_tail), floats)

    def _build(self, variant: Variant, numbers: tuple[float, ...]) -> _Started:
        config = self._config
        constexprs = tuple(self._constexprs(variant, (*numbers[1:7], *numbers[8:11])).values())
        alignments = (0, 0, 4, 4, 4)  # of new keys and values as of those of the cache; of the others single elements are read
        new = [None if one is None else Pointer(one, at) for one, at in zip(variant.new_pointers, alignments, strict=True)]
        partials = Pointer(torch.float32) if variant.split or variant.stream_k else None
        pointers = (*self._pointers, partials, *self._features, *new)
        options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], "launch_pdl": self._early}
        build = Build(self._function, (*pointers, 0.5, 0.5, *numbers, *constexprs), **options)
        made = self._builds[variant] = (build, constexprs)
        return made

    def _constexprs(self, variant: Variant, strides: tuple[float, ...]) -> dict[str, Any]:
        """The main kernel's constexprs, in its order, for K, V and Q of such strides. Raises CannotServe."""
        return constexprs_of(self._problem, self._config, variant, self._scale_first, self._early)

    def _merge(self, of: merge_triton.Merged, warps: int) -> _Started:
        constexprs = merge_triton.merge_constexprs(of, self._problem.head_dim_v, self._block_n, warps, self._early)
        values = tuple(constexprs.values())
        made = self._merges.get((warps, *values))
        if made is None:
            _, _, _, out, lse = self._pointers
            cu_seqlens_q, cache_seqlens, leftpads, sinks = (self._features[at] for at in (0, 2, 5, 6))
            numbers = [*[2] * 11, 0.5, 0.5, 2, 2]
            arguments = (Pointer(torch.float32), out, lse, sinks, cu_seqlens_q, cache_seqlens, leftpads, *numbers, *values)
            build = Build(merge_triton.flashmoe_merge_triton, arguments, num_warps=warps, launch_pdl=self._early)
            made = self._merges[warps, *values] = (build, values)
        return made


def _of_new(tensors: Tensors, options: Options) -> OfNew:
    k, v, cos, caches = tensors.new_k, tensors.new_v, tensors.rotary_cos, tensors.k.shape[0]
    if k is None or v is None:
        return NO_NEW
    rows = k.shape[2]
    positions, half, stride_cos = (0, 0, 0) if cos is None else (*cos.shape, cos.stride(0))
    return OfNew(
        (*k.stride()[:3], *v.stride()[:3]),
        (rows, caches, positions, stride_cos),
        (next_power_of_2(rows), half, options.rotary_interleaved, options.rotary_per_query),
        tuple([None if one is None else one.dtype for one in tensors.appended()]),
    )


def _sizes_of(tensors: Tensors, options: Options, out: torch.Tensor | None) -> _Sizes:
    q, k, v, table = tensors.q, tensors.k, tensors.v, tensors.page_table
    (_, heads, rows, _), (_, heads_kv, page, _) = q.shape, k.shape
    qb, qh, qm, _ = q.stride()
    ob, oh, om, _ = out_strides(tensors, out)
    (kb, kh, kn, _), (vb, vh, vn, _), keys, seqlen_q = k.stride(), v.stride(), max_keys(tensors, options), rows
    capacity = page if table is None else table.shape[1] * page
    if tensors.cu_seqlens_q is not None:
        seqlen_q, qb, ob = options.max_seqlen_q, 0, 0
    if tensors.cu_seqlens_k is not None:
        kb, vb, capacity = 0, 0, options.max_seqlen_k
    of_k_scale, of_v_scale = ((0, 0) if one is None else one.stride() for one in (tensors.k_scale, tensors.v_scale))
    return _Sizes(
        sequences(tensors), heads, heads_kv, seqlen_q, keys, rows, (kb, kh, kn, vb, vh, vn, capacity), (qb, qh, qm, ob, oh, om),
        (0, 0, 0, 0) if tensors.bias is None else tensors.bias.stride(),
        0 if table is None else table.stride(0),
        0 if tensors.alibi_slopes is None else tensors.alibi_slopes.stride(0),
        (*of_k_scale, *of_v_scale), _of_new(tensors, options),
    )  # fmt: skip
