"""The launches of split_triton.py and of its merge: bound once to shapes, strides and dtypes, then called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

from flashmoe_science.hardware.probe import gpu_of
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
from flashmoe_science.ops.attention.device import merge_triton
from flashmoe_science.ops.attention.forward.splitkv.config import (
    FAR,
    NO_NEW,
    OfNew,
    Splits,
    Variant,
    constexprs_of,
    main_grid,
    min_tiles,
    partials_of,
    places_of,
    resident,
    right_of,
    rounded_keys,
    span_of,
    splits_for,
    uneven_of,
    work_of,
)
from flashmoe_science.ops.attention.forward.tiled_triton import PLAIN_SUM
from flashmoe_science.ops.attention.front.append_fallback import Append
from flashmoe_science.ops.attention.problem import KEY_CLASS
from flashmoe_science.ops.attention.problem.features import PLAIN, Extras
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
from flashmoe_science.ops.plan import MOST_CALLS, Cache

_NO_BIAS = (0, 0, 0, 0)
_MOST_NEW = 16  # rows of a sequence that the kernel appends
_NOTHING_NEW = (None,) * 5
_Started = tuple[Callable[..., None], tuple[Any, ...]]  # a build's launch, and the constexprs that end its arguments
# Launches the kernels: (q, k, v, out, lse, the partials, the modes' tensors as _arguments has them, those of new keys,
# softmax_scale, softcap, the keys beside those of cache_seqlens, _Sizes.of_keys of the call: guarded copies of a cache may lie
# otherwise than what was bound).
_Launch = Callable[[Any, Any, Any, Any, Any, Any, tuple[Any, ...], tuple[Any, ...], float, float, int, tuple[int, ...]], None]


class _Sizes(NamedTuple):
    """What a launch is bound to beside its plan: sizes and strides. ``of_keys``: three strides of K, three of V, and the
    capacity, past which nothing is read. ``keys``: the most keys that a sequence has here, for the number of splits."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    keys: int
    stride_lse: int
    of_keys: tuple[int, ...]
    strides: tuple[int, ...]  # of Q and O, three each
    stride_bias: tuple[int, ...] = _NO_BIAS
    stride_table: int = 0
    stride_slopes: int = 0
    stride_scales: tuple[int, ...] = (0, 0, 0, 0)  # of k_scale and v_scale
    of_new: OfNew = NO_NEW


class SplitLauncher(Launcher):
    """The kernels with a config, for tensors of any lengths, batch and strides, and the tensors of the modes that it was
    planned for; all else as in the inputs that it was planned for (ops/attention/inputs.py, Launcher). It holds no tensor.
    ``function``: the main kernel, to be built.

    ``bind`` and a call of it are those of a Launcher, for problems without modes; ``bind_inputs`` is for problems with any.
    """

    serves_class = True

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
        self._extras = _stand_ins(inputs.extras)
        self._builds: dict[tuple[Any, ...], _Started] = {}  # by Variant
        self._merges: dict[tuple[merge_triton.Merged, int], _Started] = {}  # with its warps
        self._merge_builds: dict[tuple[Any, ...], _Started] = {}
        self._launches: Cache[Hashable, tuple[_Launch, int]] = Cache(MOST_CALLS)
        self._block_m, self._block_n, self._ragged = config["block_m"], config["block_n"], problem.modes.lengths != "equal"
        self._right_one, self._right_more = (right_of(problem, queries) for queries in (1, 2))
        self._uneven = uneven_of(problem) and inputs.extras.cache_seqlens is not None
        left = problem.modes.window_left
        self._left = FAR if left is None else min(left, FAR)

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        """The launch of a problem without modes, for tensors like these but of any number of keys."""
        assert self._problem.modes == PLAIN
        (batch, heads, rows, _), (_, heads_kv, keys, _), _ = shapes
        (qb, qh, qm, _), (kb, kh, kn, _), (vb, vh, vn, _), (ob, oh, om, _) = strides
        strides_kv, others, block_n = (kb, kh, kn, vb, vh, vn), (qb, qh, qm, ob, oh, om), self._block_n
        launches: Cache[tuple[int, bool], tuple[_Launch, int]] = Cache(MOST_CALLS)
        none = (None,) * len(self._extras)
        new = allocator(self._on_gpu)

        def launch_for(keys: int) -> tuple[_Launch, int]:
            return self._bind(_Sizes(batch, heads, heads_kv, rows, keys, rows, (*strides_kv, keys), others), 0)

        launches[-(-keys // KEY_CLASS), keys % block_n == 0] = launch_for(keys)

        def bound(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
        ) -> None:
            keys = k.shape[2]
            alike = (-(-keys // KEY_CLASS), keys % block_n == 0)
            found = launches.get(alike)
            if found is None:
                found = launches[alike] = launch_for(keys)
            launch, floats = found
            partials = new((floats,), (1,), torch.float32) if floats else None
            of_heads = (argument(q), argument(k), argument(v), argument(out), argument(lse), argument(partials))
            launch(*of_heads, none, _NOTHING_NEW, scale, 0.0, keys, (*strides_kv, keys))

        return bound

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        """The call of inputs of the same shapes, strides and most lengths as these."""
        sizes, plain = _sizes_of(inputs), self._problem.modes == PLAIN
        launch, floats = self._bind(sizes, num_splits)
        results = results_of(inputs, floats)
        none = (None,) * len(self._extras)
        of_keys = sizes.of_keys if inputs.extras.page_table is not None or inputs.extras.cu_seqlens_k is not None else None
        in_cache = inputs.extras.cache_seqlens is not None

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            q, k, v, x = inputs.q, inputs.k, inputs.v, inputs.extras
            out, lse, partials = results(inputs.out)
            of_heads = (argument(q), argument(k), argument(v), argument(out), argument(lse), argument(partials))
            extras, mine = none if plain else _arguments(x), of_keys or _of_keys(k, v)
            before = 0 if in_cache else mine[6]
            launch(*of_heads, extras, _NOTHING_NEW, inputs.softmax_scale, x.softcap, before, mine)
            return AttentionOutput(out, lse)

        return bound

    def bind_known(
        self, inputs: AttentionInputs, num_splits: int, append: Append | None, tokens_first: bool = True
    ) -> KnownLaunch | None:
        """The call of tensors like these, without a look at them; None where their alignment or their number of rows forbids.

        Where ``inputs.extras`` has no lengths of any kind, each call says how many keys each sequence has.
        """
        sizes = _sizes_of(inputs)
        rows = sizes.seqlen_q * sizes.heads // sizes.heads_kv
        if append is not None and not (rows <= self._block_m and 0 < append.k.shape[2] <= _MOST_NEW):
            return None  # a new key is written by one program, which must be the only one that reads it
        if any(one.data_ptr() & 15 for one in (inputs.q, inputs.k, inputs.v, *(() if append is None else append[:2]))):
            return None
        sizes = sizes._replace(of_new=_of_new(append, inputs.k.shape[0]))
        launch, floats = self._bind(sizes, num_splits)
        results = results_of(inputs, floats, tokens_first)
        softcap, scale, of_keys, capacity = inputs.extras.softcap, inputs.softmax_scale, sizes.of_keys, sizes.of_keys[6]
        of_bias = 0 if inputs.extras.bias is None else inputs.extras.bias.data_ptr() & 15

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            given: list[Any] = [None if one is None else address(one) for one in tensors]
            (
                q, k, v, cu_q, cu_k, seqlens, table, places, leftpad, sinks, slopes, bias, k_scale, v_scale, new_k, new_v,
                *rotary,
            ) = given  # fmt: skip
            if not INTERPRETING and ((q | k | v | (new_k or 0) | (new_v or 0)) & 15 or (bias or 0) & 15 != of_bias):
                return None
            out, lse, partials = results(None)
            launch(
                q, k, v, address(out), argument(lse), argument(partials),
                (cu_q, cu_k, seqlens, table, places, leftpad, sinks, slopes, bias, None, k_scale, v_scale),
                (new_k, new_v, *rotary),
                scale if softmax_scale is None else softmax_scale, softcap, min(length, capacity), of_keys,
            )  # fmt: skip
            return out, lse

        return run

    def _splits(self, batch: int, heads_kv: int, rows: int, keys: int, seqlen_q: int, num_splits: int) -> tuple[int, Splits]:
        """Tiles of rows of each key head of a sequence, and into how many pieces their keys are split."""
        config = self._config
        work = work_of(batch * heads_kv, rows, keys, config, span_of(self._problem, seqlen_q, config))
        asked = num_splits or config["num_splits"]
        held, uneven = resident(self._problem, config, work), batch if self._uneven else 1
        return work.tiles_m, splits_for(work, self._block_n, min_tiles(config), asked, self._sm_count, held, uneven)

    def _bind(self, sizes: _Sizes, num_splits: int) -> tuple[_Launch, int]:
        """The launch of tensors of these sizes, and how many numbers its partials are."""
        (
            batch, heads, heads_kv, seqlen_q, keys, stride_lse, of_keys, strides,
            of_bias, of_table, of_slopes, of_scales, new,
        ) = sizes  # fmt: skip
        (kb, kh, kn, vb, vh, vn, seqlen_k), (_, qh, qm, _, oh, om) = of_keys, strides
        ends, compensated = self._ragged or seqlen_k % self._block_n != 0, self._write_lse and keys > PLAIN_SUM
        wide = max(qm, om, kn, vn, qh, oh) * max(self._block_m, self._block_n, heads // heads_kv) >= 2**30
        # All that the launch depends on: with a cache that grows it is found again for KEY_CLASS tokens.
        key = (
            num_splits, batch, heads, heads_kv, seqlen_q, rounded_keys(keys), stride_lse, ends, compensated, wide,
            stride_unit((kb, kh, kn, vb, vh, vn, *strides)),
            stride_class((kb, kh, kn, vb, vh, vn, *strides, *of_bias, *new.strides)),
            strides, of_bias, of_table, of_slopes, of_scales, new,
        )  # fmt: skip
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._bind_class(*key, of_keys)
        return launch

    def _bind_class(
        self, num_splits: int, batch: int, heads: int, heads_kv: int, seqlen_q: int, keys: int, stride_lse: int,
        ends: bool, compensated: bool, wide: bool, unit: int, of_strides: Hashable,
        strides: tuple[int, ...], of_bias: tuple[int, ...], of_table: int, of_slopes: int, of_scales: tuple[int, ...],
        new: OfNew, of_keys: tuple[int, ...],
    ) -> tuple[_Launch, int]:  # fmt: skip
        """``_bind`` of all sizes that are alike; ``of_keys`` are those of one of them."""
        group, all_heads, right = heads // heads_kv, batch * heads_kv, self._right(seqlen_q)
        tiles_m, chosen = self._splits(batch, heads_kv, seqlen_q * group, keys, seqlen_q, num_splits)
        pieces, batches, ordered, ranges, *even = chosen
        programs, rows = all_heads * tiles_m, all_heads * seqlen_q * group
        if max(programs, rows) >= 2**31:
            raise CannotServe(f"it takes {max(programs, rows)} programs; a launch may have {2**31 - 1}")
        kinds = (right is not None, ends, wide, compensated, unit, new.constexprs, new.pointers, of_strides)
        variant = Variant(group, tiles_m == 1, pieces > 1, ranges > 0, ordered, batches, *kinds)
        all_rows = rows // batch if ranges else rows  # that have places of partials
        numbers = (
            *strides, stride_lse, of_table, of_slopes, *of_bias, *of_scales, *new.strides, heads_kv, seqlen_q, pieces, ranges,
            batch, *even, self._left, FAR if right is None else right, all_rows, *new.sizes,
        )  # fmt: skip
        start, constexprs = self._builds.get(variant) or self._build(variant, (2, *of_keys, *numbers))
        tail = (*numbers, *constexprs)
        grid = main_grid(chosen, programs, batch)
        if max(pieces, ranges) == 1:
            return partial(_launch_one, start, grid, tail), 0
        warps = merge_triton.merge_warps(rows, self._sm_count)
        of_merge = merge_triton.Merged(group, pieces, ranges, batches)
        merge, merge_constexprs = self._merges.get((of_merge, warps)) or self._merge(of_merge, warps)
        places = places_of(chosen, batch)
        merge_tail = (
            *strides[3:], stride_lse, heads_kv, seqlen_q, pieces, places, batch, *even, all_rows, new.sizes[0],
            *merge_constexprs,
        )  # fmt: skip
        floats = partials_of(chosen, batch, rows, self._problem.head_dim_v) // 4
        merge_grid = merge_triton.merge_grid(rows, self._problem.head_dim_v, warps)
        return partial(_launch_two, start, grid, tail, merge, merge_grid, merge_tail), floats

    def _right(self, seqlen_q: int) -> int | None:
        return self._right_one if seqlen_q == 1 else self._right_more

    def _build(self, variant: Variant, numbers: tuple[float, ...]) -> _Started:
        config = self._config
        constexprs = tuple(self._constexprs(variant, (*numbers[1:7], *numbers[8:11])).values())
        alignments = (0, 0, 4, 4, 4)  # of new keys and values as of those of the cache; of the others single elements are read
        new = [None if one is None else Pointer(one, at) for one, at in zip(variant.new_pointers, alignments, strict=True)]
        pointers = (*self._pointers, Pointer(torch.float32) if variant.split or variant.ranged else None, *self._extras, *new)
        options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], "launch_pdl": self._early}
        build = Build(self._function, (*pointers, 0.5, 0.5, *numbers, *constexprs), **options)
        made = self._builds[variant] = (build.launch, constexprs)
        return made

    def _constexprs(self, variant: Variant, strides: tuple[float, ...]) -> dict[str, Any]:
        """The main kernel's constexprs, in its order, for K, V and Q of such strides. Raises CannotServe."""
        return constexprs_of(self._problem, self._config, variant, self._scale_first, self._early)

    def _merge(self, of: merge_triton.Merged, warps: int) -> _Started:
        constexprs = merge_triton.merge_constexprs(of, self._problem.head_dim_v, self._block_n, warps, self._early)
        values = tuple(constexprs.values())
        made = self._merge_builds.get((warps, *values))
        if made is None:
            _, _, _, out, lse = self._pointers
            cu_seqlens_q, cache_seqlens, leftpads, sinks = (self._extras[at] for at in (0, 2, 5, 6))
            numbers = [*[2] * 11, 0.5, 0.5, 2, 2]
            arguments = (Pointer(torch.float32), out, lse, sinks, cu_seqlens_q, cache_seqlens, leftpads, *numbers, *values)
            build = Build(merge_triton.flashmoe_merge_triton, arguments, num_warps=warps, launch_pdl=self._early)
            made = self._merge_builds[warps, *values] = (build.launch, values)
        self._merges[of, warps] = made
        return made


def _launch_one(
    start: Callable[..., None], grid: tuple[int, int, int], tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, extras: tuple[Any, ...], new: tuple[Any, ...], scale: float,
    softcap: float, before: int, of_keys: tuple[int, ...],
) -> None:  # fmt: skip
    start(grid, q, k, v, out, lse, None, *extras, *new, scale, softcap, before, *of_keys, *tail)


def _launch_two(
    start: Callable[..., None], grid: tuple[int, int, int], tail: tuple[Any, ...],
    merge: Callable[..., None], merge_grid: tuple[int, int, int], merge_tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, extras: tuple[Any, ...], new: tuple[Any, ...], scale: float,
    softcap: float, before: int, of_keys: tuple[int, ...],
) -> None:  # fmt: skip
    start(grid, q, k, v, out, lse, partials, *extras, *new, scale, softcap, before, *of_keys, *tail)
    merge(merge_grid, partials, out, lse, extras[6], extras[0], extras[2], extras[5], before, of_keys[6], *merge_tail)


def _of_new(append: Append | None, caches: int) -> OfNew:
    if append is None:
        return NO_NEW
    k, v, cos, sin, rotary_seqlens, interleaved, moving = append
    rows = k.shape[2]
    positions, half, stride_cos = (0, 0, 0) if cos is None else (*cos.shape, cos.stride(0))
    return OfNew(
        (*k.stride()[:3], *v.stride()[:3]),
        (rows, caches, positions, stride_cos),
        (next_power_of_2(rows), half, interleaved, moving),
        tuple([None if one is None else one.dtype for one in (k, v, cos, sin, rotary_seqlens)]),
    )


def _of_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Strides of K and V and the keys that they have room for."""
    (kb, kh, kn, _), (vb, vh, vn, _) = k.stride(), v.stride()
    return (kb, kh, kn, vb, vh, vn, k.shape[2])


def _sizes_of(inputs: AttentionInputs) -> _Sizes:
    q, k, v, x, out = inputs.q, inputs.k, inputs.v, inputs.extras, inputs.out
    (batch, heads, rows, _), (_, heads_kv, keys, _) = q.shape, k.shape
    qb, qh, qm, _ = q.stride()
    ob, oh, om, _ = shapes_of_results(inputs)[1] if out is None else out.stride()
    of_keys, seqlen_q = _of_keys(k, v), rows
    if x.cu_seqlens_q is not None:
        batch, seqlen_q, qb, ob = x.cu_seqlens_q.shape[0] - 1, x.max_seqlen_q, 0, 0
    if x.page_table is not None:
        keys = x.page_table.shape[1] * inputs.problem.modes.page
        of_keys = (*of_keys[:6], keys)
    elif x.cu_seqlens_k is not None:
        _, kh, kn, _, vh, vn, _ = of_keys
        keys = x.max_seqlen_k
        of_keys = (0, kh, kn, 0, vh, vn, keys)
    of_k_scale, of_v_scale = ((0, 0) if one is None else one.stride() for one in (x.k_scale, x.v_scale))
    return _Sizes(
        batch, heads, heads_kv, seqlen_q, min(keys, x.max_seqlen_k or keys), rows, of_keys, (qb, qh, qm, ob, oh, om),
        _NO_BIAS if x.bias is None else x.bias.stride(),
        0 if x.page_table is None else x.page_table.stride(0),
        0 if x.alibi_slopes is None else x.alibi_slopes.stride(0),
        (*of_k_scale, *of_v_scale),
    )  # fmt: skip


def _arguments(extras: Extras) -> tuple[Any, ...]:
    """``Extras.tensors`` as a launch takes them."""
    return tuple([None if one is None else address(one) for one in extras.tensors()])


def _stand_ins(extras: Extras) -> tuple[Pointer | None, ...]:
    """Pointers of the dtypes of ``Extras.tensors``; a bias has its alignment, the others' reads are of one element each."""

    def stand_in(tensor: torch.Tensor | None) -> Pointer | None:
        if tensor is None:
            return None
        dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        return Pointer(dtype, tensor.data_ptr() if tensor is extras.bias else 4)

    return tuple(stand_in(one) for one in extras.tensors())
