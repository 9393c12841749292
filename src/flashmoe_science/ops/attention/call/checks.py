"""Refuses bad arguments of an attention call before anything is launched.

A refusal is one line: the argument, what it was, what is allowed. Sizes are only compared, so the same checks hold for the
symbolic sizes that torch.compile traces with. Values (lengths, page numbers) are not read here: call/lengths.py does.
"""

from __future__ import annotations

import math

import torch

from flashmoe_science.hardware.probe import is_assumed
from flashmoe_science.ops.attention.call.tensors import DTYPES, E4M3, ArgNames, Options, Tensors, max_keys, sequences
from flashmoe_science.ops.checks import check_count, check_device, checked_tensor
from flashmoe_science.printable import shown

MAX_SPLITS = 256
_DEVICES = ("cpu", "cuda")


class Unsupported(Exception):
    """Raised with ValueError or TypeError: the input is no mistake, but our kernels do not take it."""


class UnsupportedValue(Unsupported, ValueError):
    """A size, a stride or a number of dimensions that PyTorch's own attention may take."""


class UnsupportedType(Unsupported, TypeError):
    """A dtype that PyTorch's own attention may take."""


def check_call(tensors: Tensors, options: Options) -> None:
    """Raise unless the tensors can be attended as the options say. Raises TypeError, ValueError: what is wrong, in one line;
    Unsupported where PyTorch's own attention may take it."""
    check_tensors(tensors.q, tensors.k, tensors.v, options.names)
    _check_sizes(tensors, options)
    for side in ("window_left", "window_right"):
        if (size := getattr(options, side)) is not None:
            check_count(size, side, 0)
    if options.num_splits != 0:
        check_count(options.num_splits, "num_splits", 0)
        if options.num_splits > MAX_SPLITS:
            raise ValueError(f"num_splits is {options.num_splits}; it must be from 0 to {MAX_SPLITS}")
    if any(one is not None for one in tensors.of_features()):
        _check_features(tensors, options)


def _check_features(tensors: Tensors, options: Options) -> None:
    q, k, names, batch = tensors.q, tensors.k, options.names, sequences(tensors)
    _check_lengths(tensors, options, batch)
    check_table(tensors.leftpad, names.leftpad, (batch,), q)
    if tensors.leftpad is not None and tensors.cu_seqlens_k is not None:
        raise ValueError(f"{names.leftpad} is given for packed keys; it is for keys in a cache")
    _check_bias(tensors, options, batch)
    if tensors.sinks is not None:
        check_argument(tensors.sinks, names.sinks, (q.shape[1],), q, (torch.float32, q.dtype))
        check_contiguous(tensors.sinks, names.sinks)
    check_table(tensors.prefix, names.prefix, (batch,), q)
    if tensors.prefix is not None and options.mask != "causal":
        raise ValueError(f"{names.prefix} is given and the mask is {options.mask!r}; it must be 'causal'")
    for scale, name in ((tensors.k_scale, names.k_scale), (tensors.v_scale, names.v_scale)):
        if scale is None:
            continue
        if k.dtype != E4M3:
            raise ValueError(f"{name} is given and {names.k} has dtype {k.dtype}; it is for {E4M3}")
        check_argument(scale, name, (batch, k.shape[1]), q, (torch.float32,))


def check_tensors(q: object, k: object, v: object, names: ArgNames) -> None:
    """Raise unless the three are 4-D dense tensors of one supported dtype (K and V may be e4m3) on one supported device. Raises
    TypeError: not a tensor, or a dtype that is not supported or not shared. Raises ValueError: not four dimensions, a layout
    that is not dense, devices that differ or are not supported, a lazily negated view, such as the imaginary part of a
    conjugate."""
    q, k, v = (checked_tensor(*one) for one in ((names.q, q), (names.k, k), (names.v, v)))
    named = ((names.q, q), (names.k, k), (names.v, v))
    of_keys = E4M3 if k.dtype == E4M3 else q.dtype
    for name, tensor in named:
        if tensor.dtype != (q.dtype if tensor is q else of_keys):
            raise TypeError(f"{name} has dtype {tensor.dtype} and {names.q} has {q.dtype}; they must be the same")
        check_device(name, tensor, names.q, q)
    if q.dtype not in DTYPES and q.dtype != torch.float64:
        allowed = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
        raise UnsupportedType(f"{names.q} has dtype {q.dtype}; it must be {allowed}")
    if q.device.type not in _DEVICES and not is_assumed():
        raise UnsupportedValue(f"{names.q} is on device {q.device}; it must be on a CPU or a CUDA device")
    for name, tensor in named:
        if tensor.dim() != 4:
            raise UnsupportedValue(f"{name} has {tensor.dim()} dimensions; it must have 4 (batch, heads, sequence, head_dim)")
        if not torch.compiler.is_compiling() and tensor.is_neg():
            raise UnsupportedValue(
                f"{name} is a lazily negated view; its memory must hold its values: pass {name}.resolve_neg()"
            )


def _check_sizes(tensors: Tensors, options: Options) -> None:
    """Raise unless the sizes of q, k and v fit each other and their last dimension is contiguous."""
    q, k, v, names = tensors.q, tensors.k, tensors.v, options.names
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"{names.v} has sequence length {v.shape[2]} and {names.k} has {k.shape[2]}; they must be equal")
    for name, tensor in ((names.q, q), (names.k, k), (names.v, v)):
        _check_size(name, tensor, options.allow_empty)
    if q.shape[3] != k.shape[3]:
        raise UnsupportedValue(f"{names.k} has head_dim {k.shape[3]} and {names.q} has {q.shape[3]}; they must be equal")
    # Of packed and cached keys the lengths say to which sequence they belong.
    of_batch = (names.q, q) if tensors.cu_seqlens_q is tensors.cache_seqlens is None else (names.k, k)
    for name, tensor in ((names.k, k), (names.v, v)):
        if tensor.shape[0] != of_batch[1].shape[0]:
            have = f"{name} has batch size {tensor.shape[0]} and {of_batch[0]} has {of_batch[1].shape[0]}"
            raise UnsupportedValue(f"{have}; they must be equal")
    if k.shape[1] != v.shape[1]:
        raise UnsupportedValue(f"{names.v} has {v.shape[1]} heads and {names.k} has {k.shape[1]}; they must be equal")
    if q.shape[1] == k.shape[1]:
        return
    have = f"{names.k} has {k.shape[1]} heads and {names.q} has {q.shape[1]}"
    if not options.gqa:
        raise UnsupportedValue(f"{have}; without enable_gqa=True they must be equal")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise UnsupportedValue(f"{have}; the first must divide the second")


def _check_size(name: str, tensor: torch.Tensor, allow_empty: bool) -> None:
    for dim, size_name in enumerate(("batch size", "head count", "sequence length")):
        if not allow_empty and tensor.shape[dim] < 1:
            raise UnsupportedValue(f"{name} has {size_name} 0; it must be at least 1")
    width = tensor.shape[3]
    if width < 1:
        raise UnsupportedValue(f"{name} has head_dim {width}; it must be at least 1")
    if tensor.stride(3) != 1 and width != 1:
        raise UnsupportedValue(
            f"{name} has stride {tensor.stride(3)} in its last dimension; it must be contiguous there (stride 1): "
            f"pass {name}.contiguous()"
        )


def _check_lengths(tensors: Tensors, options: Options, batch: int) -> None:
    names, q, k = options.names, tensors.q, tensors.k
    if tensors.cu_seqlens_q is not None:
        if batch < 1:
            raise ValueError(f"{names.cu_seqlens_q} has {batch + 1} entries; it must have one more than there are sequences")
        check_table(tensors.cu_seqlens_q, names.cu_seqlens_q, (batch + 1,), q)
        if q.shape[0] != 1:
            raise ValueError(f"{names.q} has batch size {q.shape[0]}; packed queries must be [1, heads, total, head_dim]")
    check_table(tensors.cache_seqlens, names.cache_seqlens, (batch,), q)
    check_table(tensors.cu_seqlens_k, names.cu_seqlens_k, (batch + 1,), q)
    check_table(tensors.cache_batch_idx, names.cache_batch_idx, (batch,), q)
    of_cache = ((tensors.page_table, names.page_table), (tensors.cache_batch_idx, names.cache_batch_idx))
    if tensors.cu_seqlens_k is not None:
        for table, name in of_cache:
            if table is not None:
                raise ValueError(f"{name} and {names.cu_seqlens_k} are given; keys are packed or in a cache, not both")
        if tensors.cu_seqlens_q is None:
            raise ValueError(f"{names.cu_seqlens_k} is given without {names.cu_seqlens_q}; queries must be packed too")
        if k.shape[0] != 1:
            raise ValueError(f"{names.k} has batch size {k.shape[0]}; packed keys must be [1, heads, total, head_dim]")
    elif tensors.cache_seqlens is not None:
        _check_cache(tensors, options, batch)
    elif tensors.cu_seqlens_q is not None:
        raise ValueError(f"{names.cu_seqlens_k} is None, and so is {names.cache_seqlens}; packed queries need one of them")
    else:
        for table, name in of_cache:
            if table is not None:
                raise ValueError(f"{name} is given without {names.cache_seqlens}, which must say how long each sequence is")


def _check_cache(tensors: Tensors, options: Options, batch: int) -> None:
    names, q, k = options.names, tensors.q, tensors.k
    if tensors.page_table is not None:
        if tensors.cache_batch_idx is not None:
            raise ValueError(f"{names.cache_batch_idx} and {names.page_table} are given; only one of them may be")
        check_table(tensors.page_table, names.page_table, (batch, None), q)
        if k.shape[2] < 1:
            raise ValueError(f"{names.k} has pages of 0 rows; a page must have at least 1")
    elif tensors.cache_batch_idx is None and k.shape[0] < batch:
        raise ValueError(f"{names.k} has {k.shape[0]} sequences and {names.q} has {batch}; it must have at least as many")


def _check_bias(tensors: Tensors, options: Options, batch: int) -> None:
    slopes, bias, names, q = tensors.alibi_slopes, tensors.bias, options.names, tensors.q
    if slopes is not None:
        if bias is not None:
            raise ValueError(f"{names.alibi_slopes} and {names.bias} are given; only one of them may be")
        check_argument(slopes, names.alibi_slopes, (batch, q.shape[1]), q, (torch.float32,))
        check_contiguous(slopes, names.alibi_slopes)
    if bias is not None:
        rows = q.shape[2] if tensors.cu_seqlens_q is None else options.max_seqlen_q
        shape = (batch, q.shape[1], rows, max_keys(tensors, options))
        check_argument(bias, names.bias, shape, q, (torch.bool, q.dtype))


def check_table(table: torch.Tensor | None, name: str, shape: tuple[int | None, ...], q: torch.Tensor) -> None:
    """Raise unless ``table`` is None or int32 of that shape (None for any size), on Q's device, its last dimension contiguous.
    Raises TypeError: not a tensor, or not int32. Raises ValueError: another shape, device or stride."""
    if table is not None:
        check_argument(table, name, shape, q, (torch.int32,))
        check_contiguous(table, name)


def check_argument(
    tensor: object, name: str, shape: tuple[int | None, ...], q: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless it is a tensor of one of the dtypes and of that shape (None for any size), on Q's device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor or None")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, dict.fromkeys(dtypes)))}")
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be ({wanted}{',' if len(shape) == 1 else ''})")
    check_device(name, tensor, "the queries", q)


def check_contiguous(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError unless the last dimension is contiguous, as kernels read it."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        have = f"{name} has stride {tensor.stride(-1)} in its last dimension"
        raise ValueError(f"{have}; it must be contiguous there: pass {name}.contiguous()")


def checked_scale(scale: object, name: str) -> float | None:
    """``scale`` as a finite Python float, or None. Raises TypeError: not a real number. Raises ValueError: NaN or infinite."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name} is {shown(scale)}; it must be a real number or None")
    if not -math.inf < scale < math.inf:  # in comparisons, which torch.compile can trace
        raise ValueError(f"{name} is {scale}; it must be finite")
    return float(scale)


def check_dropout(value: object) -> None:
    """Raise TypeError unless ``value`` is a real number, ValueError unless it is from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"dropout_p is {shown(value)}; it must be a real number from 0 to 1")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"dropout_p is {value}; it must be from 0 to 1")


def check_mask_argument(attn_mask: object, q: torch.Tensor, k: torch.Tensor, names: ArgNames) -> None:
    """Raise unless ``attn_mask`` is a tensor that broadcasts to [batch, heads, seqlen_q, seqlen_k]. Raises TypeError: not a
    tensor, or neither boolean nor of the query's dtype. Raises ValueError: of another device, or of a shape that does not
    broadcast."""
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is {shown(attn_mask)}; it must be a torch.Tensor or None")
    if attn_mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"attn_mask has dtype {attn_mask.dtype}; it must be torch.bool or that of {names.q}, {q.dtype}")
    check_device("attn_mask", attn_mask, names.q, q)
    full = (*q.shape[:-1], k.shape[-2])
    shape = tuple(attn_mask.shape)
    fits = 2 <= len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(full), strict=False))
    if not fits:
        raise ValueError(f"attn_mask has shape {shape}; it must have 2 to 4 dimensions and broadcast to {full}")
