"""The launch cache of eager calls, and when a call may bypass PyTorch's dispatcher.

A plain eager call finds its launch by a key (options, shape of the first tensor) and by PyTorch's guards, which compare the
other tensors' shapes, strides, dtypes and devices. A call that is not found is checked, given a kernel and bound; its launch
is then stored. A launch holds no tensor; it is a key and some hundred numbers, about 4 KB, and the cache is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple, TypeVar

import torch

from flashmoe_science.ops.cache import MAX_CALLS, Cache
from flashmoe_science.ops.private import (
    TensorGuards,
    any_autocast,
    dispatch_modes,
    forward_level,
    function_modes,
    function_transform,
    jit_trace,
)

V = TypeVar("V")

# Computes on the tensors of a call like the one bound to, and checks only their alignment: None if it differs. Its arguments
# are the operation's own tensors, in the operation's own order.
Launch = Callable[..., Any]

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)
MAX_VARIANTS = 8  # launches of one key, whose tensors differ in shapes or strides; the newest are tried first
_is_nested, _address = attrgetter("is_nested"), torch.Tensor.data_ptr


class CachedLaunch(NamedTuple):
    """``matches(*tensors)``: whether tensors are like those that the launch was bound to."""

    matches: Callable[..., bool]
    launch: Launch


LAUNCHES: Cache[Hashable, tuple[CachedLaunch, ...]] = Cache(MAX_CALLS)


def slow_path(*arguments: Any) -> None:
    """The launch stored for a call that cannot be one launch: it returns None, and the caller goes on as for a new call."""
    return


def find_launch(key: Hashable, tensors: Sequence[torch.Tensor]) -> Launch | None:
    """The stored launch for a call of that key with these tensors (without None); None if there is none. Raises AttributeError,
    TypeError, RuntimeError: an argument that is not a tensor, or a nested one."""
    stored = LAUNCHES.get(key)
    # Guards see modes, transforms and traces, which change where PyTorch dispatches to, and a subclass. They do not see
    # function modes, forward-mode gradients, and nested tensors.
    if stored is None or function_modes() or forward_level._current_level >= 0 or True in map(_is_nested, tensors):
        return None
    for matches, launch in stored:
        if matches(*tensors):
            return launch
    return None


def store_launch(key: Hashable, matches: Callable[..., bool], launch: Launch) -> None:
    """Store a launch for ``find_launch``, to be tried before those already under the key."""
    LAUNCHES[key] = (CachedLaunch(matches, launch), *LAUNCHES.get(key, ())[: MAX_VARIANTS - 1])


def guards_of(
    tensors: Sequence[torch.Tensor], free: Mapping[int, int] | None = None, aligned: bool = False, any_strides: bool = False
) -> Callable[..., bool]:
    """matches(*others): whether equally many others have these shapes, strides, dtypes and devices, and are as plain.

    These are torch.compile's own guards, which hold no tensor and take a third of the time of a key. No other may be nested.
    They refuse a tensor that is given twice, as lengths of queries and keys may be: then the others must repeat likewise.

    Args:
        free: by the index of a tensor, the dimension whose size is not compared.
        aligned: compare the addresses modulo 16 bytes too.
        any_strides: for tensors in ``free``, compare only that the last stride is 1.
    """
    same = _alike(tensors)
    if len(places := sorted({*same})) < len(tensors):
        inner = guards_of(
            [tensors[n] for n in places], {places.index(n): one for n, one in (free or {}).items() if n in places}, aligned,
            any_strides,
        )  # fmt: skip
        return lambda *others: _alike(others) == same and inner(*[others[n] for n in places])
    sizes: list[list[int | None]] | None = None
    strides: list[list[int | None]] | None = None
    if free:
        sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
        for place, dimension in free.items():
            sizes[place][dimension] = None
            if any_strides:
                strides[place] = [*(None for _ in sizes[place][1:]), 1]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if _is_autocast(device := tensors[0].device.type):  # the guards see that it is on, and not its dtype
        alike, dtype = check, torch.get_autocast_dtype(device)
        check = lambda *others: torch.get_autocast_dtype(device) is dtype and alike(*others)  # noqa: E731
    if not aligned:
        return check
    expected = alignment(tensors)
    return lambda *others: check(*others) and alignment(others) == expected


def _alike(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the index at which it is given first."""
    ids = [*map(id, tensors)]
    return [*map(ids.index, ids)]


def alignment(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Equal for tensors whose addresses are equal modulo 16 bytes, on which kernels are specialised; 0 if all are 0."""
    if reduce(or_, map(_address, tensors)) & 15 == 0:
        return 0
    return tuple([one.data_ptr() & 15 for one in tensors])


def is_plain(*tensors: Any) -> bool:
    """Whether a call depends only on the tensors' memory: no subclass, mode, transform, trace or lazy sign takes part. What is
    not a tensor is refused later."""
    if torch.compiler.is_compiling():
        return False
    for one in tensors:
        if isinstance(one, torch.Tensor) and (type(one) not in PLAIN or one.is_neg()):
            return False
    return not (function_modes() or dispatch_modes() or is_transformed()) and jit_trace() is None


def is_transformed() -> bool:
    """Whether forward-mode gradients or a transform of torch.func, which fused operators of PyTorch lack, may be asked for."""
    return forward_level._current_level >= 0 or function_transform() is not None


def autocast(tensors: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The tensors as PyTorch's own operators cast them under torch.autocast: fp16, bf16 and fp32 to the autocast dtype of their
    device. None if nothing is to be cast; what is not a tensor stays as it is."""
    if not any_autocast():
        return None
    dtypes = [_autocast_dtype(one) for one in tensors]
    if not any(dtypes):
        return None
    return tuple([one if dtype is None else one.to(dtype) for one, dtype in zip(tensors, dtypes, strict=True)])


def _autocast_dtype(tensor: Any) -> torch.dtype | None:
    """The dtype that a tensor is to be cast to; None if it is not cast."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _AUTOCAST:
        return None
    dtype, device = tensor.dtype, tensor.device.type
    to = torch.get_autocast_dtype(device) if _is_autocast(device) else dtype
    return None if to == dtype else to


def _is_autocast(device: str) -> bool:
    """Whether tensors on a device of that type are cast; PyTorch raises for one, such as "meta", that has no autocast."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """A context in which nothing on the tensor's device is cast."""
    if any_autocast() and _is_autocast(tensor.device.type):
        return torch.autocast(tensor.device.type, enabled=False)
    return nullcontext()


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient of any of these may be asked for."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def device_guard(index: int) -> Callable[[Callable[..., V]], Callable[..., V]]:
    """What wraps calls so that CUDA device ``index`` is current in them; the CPU and a lone GPU need no wrapping."""
    if index < 0 or torch.cuda.device_count() == 1:
        return lambda call: call

    def guard(call: Callable[..., V]) -> Callable[..., V]:
        def guarded(*args: Any) -> V:
            if torch.cuda.current_device() == index:
                return call(*args)
            with torch.cuda.device(index):
                return call(*args)

        return guarded

    return guard
