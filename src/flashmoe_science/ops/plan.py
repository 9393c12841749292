"""What eager calls of any operation share: the caches of their plans, and when a call may go around PyTorch's dispatcher.

A call is served by a *bound call*, found by a key of all that it is (shapes, strides, dtypes, alignment, options). One that is
not found is bound by a *plan*, found by a key that has no length in it but its class: a cache of keys and values that grows
by a token makes a bound call, in microseconds, and no plan, in milliseconds. Neither holds a tensor, and both caches are
bounded: a bound call is a key and some hundred numbers, about 4 KB, a plan a decision and the handles of some compiled kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import attrgetter, or_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic

from flashmoe_science.kernel import CannotServe

if TYPE_CHECKING:
    from flashmoe_science.dispatch.select import Decision

K = TypeVar("K")
V = TypeVar("V")

MOST_CALLS, MOST_PLANS = 1024, 256
NO_BACKWARD = "an input requires gradients, and no kernel of ours has a backward yet"

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._get_tracing_state
_is_nested, _address = attrgetter("is_nested"), torch.Tensor.data_ptr
_function_modes = torch._C._is_torch_function_mode_enabled
_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards


class Cache(OrderedDict[K, V]):
    """A dictionary that drops its oldest entry when it is full. To drop all at once would make one call wait for that, and all
    later ones for what they had; an order of use would have to be kept at each call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most:
            self.popitem(last=False)  # one step in C, which no other thread can come between
        super().__setitem__(key, value)


def is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the tensors' memory is all there is to a call: no subclass, mode, transform, trace or lazy sign has a part."""
    return (
        type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and not has_torch_function_variadic(q, k, v)
        and not _dispatch_modes()
        and _function_transform() is None
        and _jit_trace() is None
        and forward_ad._current_level < 0
        and not (q.is_neg() or k.is_neg() or v.is_neg())
    )


def is_undisturbed() -> bool:
    """Whether no mode, transform or trace has a part in what is called now; with it, plain tensors are as in ``is_plain``."""
    return (
        not _function_modes()
        and not _dispatch_modes()
        and _function_transform() is None
        and _jit_trace() is None
        and forward_ad._current_level < 0
    )


def guards_of(tensors: Sequence[torch.Tensor], free: Mapping[int, int] | None = None) -> Callable[..., bool]:
    """fits(*others): whether as many others have these shapes, strides, dtypes and devices, and are as plain.

    torch.compile's own guards, which hold no tensor: a third of the time of a key of all that. No other may be nested. They
    refuse a tensor that is given twice, as the lengths of queries and keys may be: where one is, others must be given alike.

    Args:
        free: by the place of a tensor, the dimension whose size is not looked at.
    """
    if len(places := _firsts(tensors)) < len(tensors):
        same = _alike(tensors)
        inner = guards_of(
            [tensors[n] for n in places], {places.index(n): one for n, one in (free or {}).items() if n in places}
        )
        return lambda *others: _alike(others) == same and inner(*[others[n] for n in places])
    sizes: list[list[int | None]] | None = None
    if free:
        sizes = [list(one.shape) for one in tensors]
        for place, dimension in free.items():
            sizes[place][dimension] = None
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=None).check
    return check


def _alike(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Equal for tensors of which the same ones are one."""
    ids = [*map(id, tensors)]
    return [*map(ids.index, ids)]


def _firsts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The places of tensors that are at no place before."""
    return [n for n, first in enumerate(_alike(tensors)) if n == first]


def could_be_known(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``guards_of`` may be asked about these tensors, and what they do not see is not there. They see modes,
    transforms and traces, which change where PyTorch dispatches to."""
    return not _function_modes() and forward_ad._current_level < 0 and True not in map(_is_nested, tensors)


def alignment(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Equal for tensors that lie alike in steps of 16 bytes, on which kernels are specialised; 0 where all are multiples."""
    if reduce(or_, map(_address, tensors)) & 15 == 0:
        return 0
    return tuple([one.data_ptr() & 15 for one in tensors])


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


def check_kernel_with_gradients(kernel: str | None, framework: str) -> None:
    """Raise if a kernel other than the framework's own was asked for where gradients are needed.

    Raises:
        CannotServe: it was.
    """
    if kernel not in (None, framework):
        raise CannotServe(
            f"kernel {kernel!r} cannot serve this call: {NO_BACKWARD}; {framework!r} can, or call it under torch.no_grad()"
        )


def with_launch_path(decision: Decision) -> Decision:
    """The decision for a kernel that is planned; its reason says so where launches take a slower path."""
    from flashmoe_science.ops.launch import launch_path  # it brings Triton

    path = launch_path()
    return decision if path is None else replace(decision, reason=f"{decision.reason}; {path}")
