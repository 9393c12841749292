"""The arguments of an attention call with modes: which Modes its tensors make, and the checks before anything is launched.

A refusal is one line: the argument, what it was, what is allowed. Sizes are only compared, so the same checks hold for the
symbolic sizes that torch.compile traces with. Values on a device (lengths, page numbers) are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.spec import DTYPES, Names, UnservedType, UnservedValue, check_dense
from flashmoe_science.ops.attention.problem import AttentionProblem, Layout, Mask
from flashmoe_science.ops.attention.problem.features import Bias, Extras, Lengths, Modes

E4M3 = torch.float8_e4m3fn
MOST_SPLITS = 256
_FROM_TENSORS = ("softcap", "sinks", "bias", "prefix", "lengths", "page", "leftpad", "fp8_cache")
_DEVICES = ("cpu", "cuda")


class ModeNames(NamedTuple):
    """What a public function calls the tensors of Extras, for its messages; fields as there."""

    cu_seqlens_q: str = "cu_seqlens_q"
    cu_seqlens_k: str = "cu_seqlens_k"
    cache_seqlens: str = "cache_seqlens"
    page_table: str = "page_table"
    cache_batch_idx: str = "cache_batch_idx"
    leftpad: str = "leftpad"
    sinks: str = "sinks"
    alibi_slopes: str = "alibi_slopes"
    bias: str = "bias"
    prefix: str = "prefix"
    k_scale: str = "k_scale"
    v_scale: str = "v_scale"


class ModesSpec(NamedTuple):
    """How one call is to be served; with the tensors it decides the plan. Fields as of ``attend_modes``, windows of Modes."""

    mask: Mask
    window_left: int | None = None
    window_right: int | None = None
    return_lse: bool = False
    kernel: str | None = None
    num_splits: int = 0
    names: Names = Names("q", "k", "v", "softmax_scale")
    others: ModeNames = ModeNames()


def modes_of(k: torch.Tensor, extras: Extras, window_left: int | None = None, window_right: int | None = None) -> Modes:
    """The Modes that the tensors of a call make: what is given is asked for."""
    bias: Bias = "none"
    if extras.alibi_slopes is not None:
        bias = "alibi"
    elif extras.bias is not None:
        bias = "boolean" if extras.bias.dtype == torch.bool else "additive"
    lengths: Lengths = "equal"
    if extras.cu_seqlens_q is not None:
        lengths = "packed"
    elif extras.cache_seqlens is not None:
        lengths = "ragged"
    page = 0 if extras.page_table is None else k.shape[2]
    make = _modes if type(page) is int and not torch.compiler.is_compiling() else Modes  # a symbolic size has no hash
    return make(
        window_left, window_right, math.ceil(extras.softcap), extras.sinks is not None, bias, int(extras.prefix is not None),
        lengths, page, extras.leftpad is not None, k.dtype == E4M3,
    )  # fmt: skip


_modes = lru_cache(maxsize=512)(Modes)


def sequences(q: torch.Tensor, extras: Extras) -> int:
    """How many sequences there are."""
    return q.shape[0] if extras.cu_seqlens_q is None else extras.cu_seqlens_q.shape[0] - 1


def longest_keys(k: torch.Tensor, extras: Extras) -> int:
    """The most keys that a sequence can have, as far as sizes tell."""
    most = k.shape[2] if extras.page_table is None else extras.page_table.shape[1] * k.shape[2]
    return min(most, extras.max_seqlen_k) if extras.max_seqlen_k else most


def problem_with_modes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, modes: Modes, extras: Extras
) -> AttentionProblem:
    """The AttentionProblem of tensors that have been checked.

    Raises:
        ProblemError: a head dimension above 256, or a size of 0.
    """
    layout: Layout = "bshd" if q.stride(1) < q.stride(2) else "bhsd"
    rows = extras.max_seqlen_q if extras.cu_seqlens_q is not None else q.shape[2]
    return AttentionProblem(
        sequences(q, extras), q.shape[1], k.shape[1], rows, longest_keys(k, extras), q.shape[3], v.shape[3], DTYPES[q.dtype],
        mask, layout, modes,
    )  # fmt: skip


# The checks ------------------------------------------------------------------------------------------------------------------


def check_modes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec) -> None:
    """Raise unless the tensors can be attended as ``spec`` says.

    Raises:
        TypeError, ValueError: what is wrong, in one line; Unserved where PyTorch's own attention may take it.
    """
    _check_tensors(q, k, v, spec.names)
    _check_sizes(q, k, v, spec.names)
    batch, others = sequences(q, extras), spec.others
    for side, size in (("window_left", spec.window_left), ("window_right", spec.window_right)):
        if size is not None:
            check_count(size, side, 0)
    _check_lengths(q, k, v, extras, batch, spec)
    check_table(extras.leftpad, others.leftpad, (batch,), q)
    if extras.leftpad is not None and extras.cu_seqlens_k is not None:
        raise ValueError(f"{others.leftpad} is given for packed keys; it is for keys in a cache")
    _check_bias(q, k, extras, batch, spec)
    if extras.sinks is not None:
        _check_float(extras.sinks, others.sinks, (q.shape[1],), q, (torch.float32, q.dtype))
    check_table(extras.prefix, others.prefix, (batch,), q)
    if extras.prefix is not None and spec.mask != "causal":
        raise ValueError(f"{others.prefix} is given and the mask is {spec.mask!r}; it must be 'causal'")
    for scale, name in ((extras.k_scale, others.k_scale), (extras.v_scale, others.v_scale)):
        if scale is None:
            continue
        if k.dtype != E4M3:
            raise ValueError(f"{name} is given and {spec.names.k} has dtype {k.dtype}; it is for {E4M3}")
        _check_float(scale, name, (batch, k.shape[1]), q, (torch.float32,))


def check_agreement(k: torch.Tensor, extras: Extras, modes: Modes) -> None:
    """Raise ValueError unless the modes are those of the tensors; of a cap and a prefix they say only that there is one."""
    made = modes_of(k, extras, modes.window_left, modes.window_right)
    if made is modes:  # as where the caller has them from modes_of
        return
    for field in _FROM_TENSORS:
        said, is_so = getattr(modes, field), getattr(made, field)
        if field in ("softcap", "prefix"):
            said, is_so = bool(said), bool(is_so)
        if said != is_so:
            raise ValueError(f"modes.{field} is {said!r}, and the tensors given make it {is_so!r}; they must agree")


def _check_tensors(q: object, k: object, v: object, names: Names) -> None:
    tensors = tuple(zip(names[:3], (q, k, v), strict=True))
    check_dense(tensors)
    assert isinstance(q, torch.Tensor)
    assert isinstance(k, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    if q.dtype not in DTYPES:
        raise UnservedType(f"{names.q} has dtype {q.dtype}; it must be torch.float16, torch.bfloat16 or torch.float32")
    if q.device.type not in _DEVICES:
        raise UnservedValue(f"{names.q} is on device {q.device}; it must be on a CPU or a CUDA device")
    if k.dtype not in (q.dtype, E4M3):
        raise TypeError(
            f"{names.k} has dtype {k.dtype} and {names.q} has {q.dtype}; they must be the same, or {names.k} {E4M3}"
        )
    if v.dtype != k.dtype:
        raise TypeError(f"{names.v} has dtype {v.dtype} and {names.k} has {k.dtype}; they must be the same")
    for name, one in ((names.k, k), (names.v, v)):
        if one.device != q.device:
            raise ValueError(f"{name} is on {one.device} and {names.q} on {q.device}; they must be on the same device")
    for name, one in zip(names[:3], (q, k, v), strict=True):
        if one.dim() != 4:
            raise UnservedValue(f"{name} has {one.dim()} dimensions; it must have 4 (batch, heads, sequence, head_dim)")
        if not torch.compiler.is_compiling() and one.is_neg():
            raise UnservedValue(f"{name} is a lazily negated view; its memory must hold its values: pass {name}.resolve_neg()")


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Names) -> None:
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{names.v} has shape {_sizes(v)} and {names.k} has {_sizes(k)}; they may differ in the last size only"
        )
    if q.shape[3] != k.shape[3]:
        raise UnservedValue(f"{names.k} has head_dim {k.shape[3]} and {names.q} has {q.shape[3]}; they must be equal")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise UnservedValue(
            f"{names.k} has {k.shape[1]} heads and {names.q} has {q.shape[1]}; the first must divide the second"
        )
    for name, one in zip(names[:3], (q, k, v), strict=True):
        if one.shape[3] < 1:
            raise UnservedValue(f"{name} has head_dim 0; it must be at least 1")
        if one.stride(3) != 1 and one.shape[3] != 1:
            raise UnservedValue(
                f"{name} has stride {one.stride(3)} in its last dimension; it must be contiguous there (stride 1): "
                f"pass {name}.contiguous()"
            )


def _check_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, batch: int, spec: ModesSpec) -> None:
    names, others = spec.names, spec.others
    if extras.cu_seqlens_q is not None:
        if batch < 1:
            raise ValueError(f"{others.cu_seqlens_q} has {batch + 1} entries; it must have one more than there are sequences")
        check_table(extras.cu_seqlens_q, others.cu_seqlens_q, (batch + 1,), q)
        if q.shape[0] != 1:
            raise ValueError(f"{names.q} has batch size {q.shape[0]}; packed queries must be [1, heads, total, head_dim]")
    check_table(extras.cache_seqlens, others.cache_seqlens, (batch,), q)
    check_table(extras.cu_seqlens_k, others.cu_seqlens_k, (batch + 1,), q)
    check_table(extras.cache_batch_idx, others.cache_batch_idx, (batch,), q)
    if extras.cu_seqlens_k is not None:
        for table, name in ((extras.page_table, others.page_table), (extras.cache_batch_idx, others.cache_batch_idx)):
            if table is not None:
                raise ValueError(f"{name} and {others.cu_seqlens_k} are given; keys are packed or in a cache, not both")
        if extras.cu_seqlens_q is None:
            raise ValueError(f"{others.cu_seqlens_k} is given without {others.cu_seqlens_q}; queries must be packed too")
        if k.shape[0] != 1:
            raise ValueError(f"{names.k} has batch size {k.shape[0]}; packed keys must be [1, heads, total, head_dim]")
        return
    if extras.cache_seqlens is None:
        if extras.cu_seqlens_q is not None:
            raise ValueError(
                f"{others.cu_seqlens_k} is None, and so is {others.cache_seqlens}; packed queries need one of them"
            )
        for table, name in ((extras.page_table, others.page_table), (extras.cache_batch_idx, others.cache_batch_idx)):
            if table is not None:
                raise ValueError(f"{name} is given without {others.cache_seqlens}, which must say how long each sequence is")
        if k.shape[0] != batch:
            raise UnservedValue(f"{names.k} has batch size {k.shape[0]} and {names.q} has {batch}; they must be equal")
        return
    _check_cache(q, k, extras, batch, spec)


def _check_cache(q: torch.Tensor, k: torch.Tensor, extras: Extras, batch: int, spec: ModesSpec) -> None:
    others = spec.others
    if extras.page_table is not None:
        if extras.cache_batch_idx is not None:
            raise ValueError(f"{others.cache_batch_idx} and {others.page_table} are given; only one of them may be")
        check_table(extras.page_table, others.page_table, (batch, None), q)
        if k.shape[2] < 1:
            raise ValueError(f"{spec.names.k} has pages of 0 rows; a page must have at least 1")
    elif extras.cache_batch_idx is None and k.shape[0] < batch:
        raise ValueError(
            f"{spec.names.k} has {k.shape[0]} sequences and {spec.names.q} has {batch}; it must have at least as many"
        )


def _check_bias(q: torch.Tensor, k: torch.Tensor, extras: Extras, batch: int, spec: ModesSpec) -> None:
    slopes, bias, others = extras.alibi_slopes, extras.bias, spec.others
    if slopes is not None:
        if bias is not None:
            raise ValueError(f"{others.alibi_slopes} and {others.bias} are given; only one of them may be")
        _check_float(slopes, others.alibi_slopes, (batch, q.shape[1]), q, (torch.float32,))
    if bias is not None:
        rows = q.shape[2] if extras.cu_seqlens_q is None else extras.max_seqlen_q
        shape = (batch, q.shape[1], rows, longest_keys(k, extras))
        _check_float(bias, others.bias, shape, q, (torch.bool, q.dtype))


def check_table(table: torch.Tensor | None, name: str, shape: tuple[int | None, ...], q: torch.Tensor) -> None:
    """Raise unless ``table`` is None or int32 of that shape (None for any size), on Q's device, its last dimension contiguous.

    Raises:
        TypeError: not a tensor, or not int32.
        ValueError: another shape, device or stride.
    """
    if table is None:
        return
    if not isinstance(table, torch.Tensor):
        raise TypeError(f"{name} is a {type(table).__name__}; it must be a torch.Tensor or None")
    if table.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {table.dtype}; it must be torch.int32")
    _check_shape(table, name, shape, q)
    if table.stride(-1) != 1 and table.shape[-1] > 1:
        raise ValueError(f"{name} has stride {table.stride(-1)} in its last dimension; it must be contiguous there")


def _check_float(
    tensor: object, name: str, shape: tuple[int | None, ...], q: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor or None")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, dict.fromkeys(dtypes)))}")
    _check_shape(tensor, name, shape, q)


def _check_shape(tensor: torch.Tensor, name: str, shape: tuple[int | None, ...], q: torch.Tensor) -> None:
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {_sizes(tensor)}; it must be ({wanted}{',' if len(shape) == 1 else ''})")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} and the queries on {q.device}; they must be on the same device")


def _sizes(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def check_count(value: object, name: str, least: int, shown: Callable[[object], str] = repr) -> None:
    """Raise unless ``value`` is an integer of at least ``least``.

    Raises:
        TypeError: not an integer.
        ValueError: below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} is {shown(value)}; it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_splits(value: object) -> None:
    """Raise unless ``value`` is a number of splits: an integer from 0 to 256.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    check_count(value, "num_splits", 0)
    assert isinstance(value, int)
    if value > MOST_SPLITS:
        raise ValueError(f"num_splits is {value}; it must be from 0 to {MOST_SPLITS}")
