"""Gluon kernels on the CPU, in PyTorch's operators: what they compute and how their partitions wait for each other.

Importing this module, in a process of its own and before any kernel, puts stand-ins where Gluon is. Tensors are PyTorch's
without layouts, partitions are threads, a barrier counts arrivals and bytes in phases and refuses too many. Copies take effect
at once, at the addresses of their descriptors, with the engine's bounds. Programs run one after another: the first takes most
tiles of a counter. What a GPU may order otherwise between two barriers is not seen.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.experimental.gluon
import triton.runtime.jit

WAIT = 60  # seconds, after which partitions are taken to wait for each other
_FAILED: list[BaseException] = []
_PROGRAM = {"id": 0, "count": 1}


class _Integer(int):
    value = property(int)


class _Tensor(torch.Tensor):
    """A tensor in registers."""

    type = property(lambda self: types.SimpleNamespace(layout=None))

    def split(self) -> tuple[torch.Tensor, ...]:
        return self.unbind(-1)


def _registers(value: Any, like: torch.dtype | None = None) -> torch.Tensor:
    return torch.as_tensor(value, dtype=like).as_subclass(_Tensor)


def _plain(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(torch.Tensor)


def _memory(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


class _Pointer:
    def __init__(self, dtype: torch.dtype, address: int, offset: Any = 0) -> None:
        self.scalar, self.address, self.offset = dtype, address, offset
        self.dtype = types.SimpleNamespace(element_ty=dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.scalar, self.address, self.offset + offset)

    def reach(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory from the lowest to the highest address that the mask allows, places there, and the mask."""
        offset, allowed = torch.broadcast_tensors(_plain(self.offset), _plain(True if mask is None else mask))
        inside = offset[allowed]
        low, high = (int(inside.min()), int(inside.max())) if inside.numel() else (0, -1)
        return _memory(self.address + low * self.scalar.itemsize, self.scalar, high - low + 1), inside - low, allowed


def _load(pointer: _Pointer, mask: Any = None, other: float = 0) -> torch.Tensor:
    memory, places, allowed = pointer.reach(mask)
    out = torch.full(allowed.shape, other, dtype=pointer.scalar)
    out[allowed] = memory[places.long()]
    return _registers(out)


def _store(pointer: _Pointer, value: Any, mask: Any = None) -> None:
    memory, places, allowed = pointer.reach(mask)
    memory[places.long()] = _plain(value).expand(allowed.shape)[allowed].to(pointer.scalar)


def _atomic_add(pointer: _Pointer, value: int, sem: str) -> torch.Tensor:
    old = _load(pointer)
    _store(pointer, old + value)
    return old


class _Barrier:
    def init(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0
        self.changed = threading.Condition()

    def arrive(self, count: int = 1, expected: int = 0, copied: int = 0) -> None:
        with self.changed:
            self.pending, self.bytes = self.pending - count, self.bytes + expected - copied
            assert self.pending >= 0, "a barrier has more arrivals than it counts"
            assert self.bytes >= 0, "a barrier has more bytes than it expects"
            if self.pending == self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != int(parity) or bool(_FAILED), timeout=WAIT)
            assert not _FAILED, "another partition failed"
            assert done, "partitions wait for each other"


class _Barriers:
    def __init__(self, count: int) -> None:
        self.shape, self.barriers = [count, 1], [_Barrier() for _ in range(count)]

    def index(self, place: Any) -> _Barrier:
        return self.barriers[int(place)]


class _Shared:
    """Shared memory, full of what is no number until it is written."""

    layout = None

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape, self.dtype, self.numel = data, list(data.shape), data.dtype, data.numel()

    def index(self, place: Any) -> _Shared:
        return _Shared(self.data[int(place)])

    def reshape(self, shape: list[int]) -> _Shared:
        return _Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(order))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> _Shared:
        return _Shared(self.data.view(shape))

    def load(self, layout: Any) -> torch.Tensor:
        return _registers(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert list(value.shape) == self.shape
        self.data.copy_(_plain(value))


class _BarrierLayout:
    pass


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, _BarrierLayout):
        return _Barriers(shape[0])
    return _Shared(torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -1, dtype=dtype))


class _Template:
    """What a build is made for in place of a descriptor."""

    def __init__(self, base: Any, shape: Any, strides: Any, block_shape: list[int], layout: Any) -> None:
        self.dtype, self.block_shape = base.dtype, block_shape


class _Descriptor:
    layout = None

    def __init__(self, address: int, shape: Any, strides: Any, template: _Template) -> None:
        self.address, self.shape, self.strides, self.dtype = address, shape, strides, template.dtype
        block, size = template.block_shape, template.dtype.itemsize
        self.block_type = types.SimpleNamespace(shape=list(block), nbytes=math.prod(block) * size)
        assert len(block) == len(shape) == len(strides) <= 5
        assert address % 16 == 0 == sum(stride * size % 16 for stride in strides[:-1])
        assert strides[-1] == 1

    def rows(self, at: list[Any]) -> Iterator[tuple[tuple[int, ...], slice, torch.Tensor]]:
        """Of a copy from ``at``: each row within bounds, its columns within them, and their memory."""
        *outer, column = map(int, at)
        *block, width = self.block_type.shape
        columns = slice(max(0, -column), min(width, self.shape[-1] - column))
        for place in itertools.product(*map(range, block)):
            here = [one + step for one, step in zip(outer, place, strict=True)]
            if columns.stop > columns.start and all(0 <= one < size for one, size in zip(here, self.shape[:-1], strict=True)):
                elements = column + columns.start + sum(one * stride for one, stride in zip(here, self.strides, strict=False))
                address = (self.address + elements * self.dtype.itemsize) % 2**64
                yield place, columns, _memory(address, self.dtype, columns.stop - columns.start)


def _tma_load(descriptor: _Descriptor, at: list[Any], barrier: _Barrier, shared: _Shared, pred: Any = True) -> None:
    if bool(pred):
        assert shared.shape == descriptor.block_type.shape
        shared.data.zero_()
        for place, columns, memory in descriptor.rows(at):
            shared.data[place][columns] = memory
        barrier.arrive(0, copied=descriptor.block_type.nbytes)


def _tma_store(descriptor: _Descriptor, at: list[Any], shared: _Shared) -> None:
    assert shared.shape == descriptor.block_type.shape
    for place, columns, memory in descriptor.rows(at):
        memory.copy_(shared.data[place][columns])


def _mma(a: _Shared, b: _Shared, acc: torch.Tensor, use_acc: Any = True, is_async: bool = False) -> torch.Tensor:
    product = _registers(a.data.float() @ b.data.float())
    return acc + product if bool(use_acc) else product


def _approximate(text: str, constraints: str, values: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    return {"ex2": torch.exp2, "rcp": torch.reciprocal}[text[:3]](values[0])


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            _FAILED.append(error)

    threads = [threading.Thread(target=run, args=one) for one in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _FAILED:
        raise _FAILED[0]


def _where(condition: Any, one: Any, other: Any) -> Any:
    if not isinstance(condition, torch.Tensor):
        return one if condition else other
    return _registers(torch.where(_plain(condition), _plain(one), _plain(other)))


def _extreme(of_tensors: Callable[..., torch.Tensor], of_numbers: Callable[..., int]) -> Callable[[Any, Any], Any]:
    def extreme(a: Any, b: Any) -> Any:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return _registers(of_tensors(_plain(a), _plain(b)))
        return of_numbers(a, b)

    return extreme


class _Layout:
    def __init__(self, *arguments: Any) -> None:
        self.parent = arguments[-1]

    @classmethod
    def get_default_for(cls, *arguments: Any) -> _Layout:
        return cls(*arguments)


_LAYOUTS = ("NVMMASharedLayout", "SwizzledSharedLayout", "BlockedLayout", "SliceLayout", "NVMMADistributedLayout")
_SCALARS = ("int32", "int64", "float32", "float16", "bfloat16")
LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(_LAYOUTS, _Layout), **{one: getattr(torch, one) for one in _SCALARS},
    "constexpr": lambda value: _Integer(value) if type(value) is int else value,
    "constexpr_function": lambda function: function,
    "load": _load, "store": _store, "atomic_add": _atomic_add, "where": _where, "static_range": range, "static_assert": bool,
    "minimum": _extreme(torch.minimum, min), "maximum": _extreme(torch.maximum, max), "to_tensor": lambda value: value,
    "program_id": lambda axis: _PROGRAM["id"], "num_programs": lambda axis: _PROGRAM["count"],
    "arange": lambda first, end, layout=None: _registers(torch.arange(first, end)),
    "full": lambda shape, value, dtype, layout=None: _registers(torch.full(shape, int(value), dtype=dtype)),
    "zeros": lambda shape, dtype, layout=None: _registers(torch.zeros(shape, dtype=dtype)),
    "expand_dims": torch.unsqueeze, "convert_layout": lambda value, layout: value, "join": lambda *two: torch.stack(two, -1),
    "sum": torch.sum, "max": torch.amax, "sigmoid": torch.sigmoid, "erf": torch.erf, "exp": torch.exp, "exp2": torch.exp2,
    "allocate_shared_memory": _allocate, "warp_specialize": _specialize, "inline_asm_elementwise": _approximate,
    "shared_memory_descriptor": _Shared, "barrier": lambda: None,
}  # fmt: skip
MBARRIER = types.SimpleNamespace(
    MBarrierLayout=_BarrierLayout,
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, parity: barrier.wait(parity),
    expect=lambda barrier, count, pred=True: barrier.arrive(1, expected=count) if bool(pred) else None,
    arrive=lambda barrier, count=1, pred=True: barrier.arrive(count) if bool(pred) else None,
)
ASYNC_COPY = types.SimpleNamespace(  # by the 128 threads of a producer
    async_load=lambda shared, pointer, mask=None: shared.store(_load(pointer, mask)),
    mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(128),
)
TMA = types.SimpleNamespace(async_load=_tma_load, async_store=_tma_store, store_wait=lambda pending: None)


def _function_in(function: Any, **names: Any) -> Any:
    """A function whose module has these names."""
    return types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)


class Build:
    """In place of ``ops.launch.Build`` of Gluon kernels: launches interpret them. Tensors are given by their addresses."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        self._arguments = arguments
        self._function = _function_in(function, gdc_launch_dependents=lambda: None, gdc_wait=lambda: None)

    def encoder(self, index: int, template: _Template, shape: Any, strides: Any) -> Callable[[int], tuple[Any, ...]]:
        templates = [one for one in self._arguments if isinstance(one, _Template)]
        assert templates[index].block_shape == template.block_shape
        return lambda address: (_Descriptor(address, shape, strides, template),)

    def bound(self, grid: tuple[int, int, int], *last: Any) -> Callable[..., None]:
        from flashmoe_science.ops.launch import Pointer

        def start(*given: Any) -> None:
            pairs = zip(self._arguments, given, strict=False)
            arguments = [_Pointer(one.dtype, here) if isinstance(one, Pointer) else here for one, here in pairs]
            _PROGRAM["count"] = grid[0]
            for _PROGRAM["id"] in range(grid[0]):
                self._function(*arguments, *last)

        return start


def _install() -> None:
    triton.runtime.jit.mangle_type(torch.zeros(1))  # what Triton itself imports of Gluon it has now
    name = "triton.experimental.gluon"
    for module in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[module]
    hopper = {
        "mbarrier": MBARRIER, "tma": TMA, "fence_async_shared": lambda: None, "warpgroup_mma": _mma,
        "warpgroup_mma_wait": lambda pending, values: values[0],
    }  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "": {"jit": lambda function=None, **options: function or (lambda one: one)},
        ".language": LANGUAGE, ".language.nvidia": {}, ".language.nvidia.hopper": hopper,
        ".language.nvidia.ampere": {"async_copy": ASYNC_COPY}, ".nvidia": {}, ".nvidia.hopper": {"TensorDescriptor": _Template},
    }  # fmt: skip
    for suffix, values in contents.items():
        sys.modules[name + suffix] = module = types.ModuleType(name + suffix)
        module.__dict__.update(values, __path__=[])
    sys.modules[name].language = sys.modules[f"{name}.language"]  # type: ignore[attr-defined]
    triton.experimental.gluon = sys.modules[name]

    from flashmoe_science.ops import gluon_bridge

    gluon_bridge.as_gluon = lambda function: _function_in(function.fn, tl=sys.modules[f"{name}.language"])


_install()
