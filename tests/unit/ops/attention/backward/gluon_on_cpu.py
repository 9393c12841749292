"""Runs Gluon and Triton kernels as they are written, without compiling them: tensors are PyTorch's, partitions are threads.

What a kernel computes, where it reads and writes, and what waits for what are those of the source; layouts, and memory that is
used again too early, are not seen. Shared memory begins as NaN. A copy that leaves its tensor other than by the rules of the
copy engine is an error, and so is a wait that does not end.
"""

from __future__ import annotations

import ctypes
from collections import namedtuple
from itertools import product
from threading import Condition, Thread, local
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITFunction

from flashmoe_science.ops.descriptors import RAGGED_ROWS
from flashmoe_science.ops.launch import Pointer

_WAIT_S = 20
_here = local()  # of a thread: its program's indices, the grid, the threads of all partitions


class Int(int):
    """A number of a program. A division of a negative one, which Triton rounds towards 0, must be exact."""

    def to(self, dtype: Any) -> Int:
        return self


def _arithmetic(name: str) -> Any:
    whole = getattr(int, name)

    def of(self: Int, other: Any) -> Any:
        found = whole(self, other)
        if name in ("__floordiv__", "__mod__") and found is not NotImplemented:
            assert self >= 0 or (int(self) % int(other) == 0 and name == "__floordiv__"), (self, name, other)
        return found if found is NotImplemented else Int(found)

    return of


for _name in ("add", "sub", "mul", "and", "xor"):
    for _each in (f"__{_name}__", f"__r{_name}__"):
        setattr(Int, _each, _arithmetic(_each))
for _name in ("__floordiv__", "__mod__"):
    setattr(Int, _name, _arithmetic(_name))


class Values(torch.Tensor):
    """A tensor of a program, which no operation changes."""

    __iadd__, __isub__, __imul__, __iand__ = torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.__and__  # type: ignore[assignment]
    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Values)


class Address:
    """Numbers at an address, and which of them."""

    def __init__(self, base: int, element: torch.dtype, at: Any = 0) -> None:
        self.base, self.element, self.at = base, element, at
        self.dtype = SimpleNamespace(element_ty=element)

    def __add__(self, more: Any) -> Address:
        return Address(self.base, self.element, self.at + more)

    def numbers(self, count: int) -> torch.Tensor:
        return _memory(self.base, count, self.element)


def _memory(base: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(base), dtype=dtype)


def _load(address: Address, mask: Any = True, other: Any = None) -> Any:
    if not isinstance(address.at, torch.Tensor):
        assert address.at >= 0
        found = address.numbers(address.at + 1)[address.at] if mask else other
        return _values(found.clone()) if address.element.is_floating_point else Int(found)
    at, mask = torch.broadcast_tensors(address.at, torch.as_tensor(mask))
    assert not mask.any() or at[mask].min() >= 0
    found = torch.full(at.shape, float("nan") if other is None else other, dtype=address.element)
    if mask.any():
        found[mask] = address.numbers(int(at[mask].max()) + 1)[at[mask]]
    return _values(found)


def _store(address: Address, values: torch.Tensor, mask: Any = True) -> None:
    at, mask = torch.broadcast_tensors(torch.as_tensor(address.at), torch.as_tensor(mask))
    if mask.any():
        assert at[mask].min() >= 0
        address.numbers(int(at[mask].max()) + 1)[at[mask]] = values.to(address.element)[mask]


class Descriptor:
    """A tensor as the copy engine sees it; of ``ragged`` rows of which a copy says the end."""

    def __init__(self, template: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.dtype, self.layout, tile = template.base.dtype, None, list(template.block_shape)
        nbytes = self.dtype.itemsize * torch.Size(tile).numel()
        self.block_type = SimpleNamespace(shape=tile, nbytes=nbytes)
        self._ragged, self._address, self._shape, self._strides = len(shape) == 5, address, shape, strides

    def rows(self, place: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Of a tile at a place what is in the tensor, and where in the tile that is."""
        shape, strides, tile, first = list(self._shape), list(self._strides), self.block_type.shape, list(map(int, place))
        base = self._address
        if self._ragged:
            far, end, *first = first
            assert far == RAGGED_ROWS.value
            shift = end - RAGGED_ROWS.value
            shape, strides, tile = shape[2:], strides[2:], tile[2:]
            base += shift * strides[-2] * self.dtype.itemsize
        low = [max(one, 0) for one in first]
        high = [max(min(one + size, most), least) for one, size, most, least in zip(first, tile, shape, low, strict=True)]
        sizes = [last - one for one, last in zip(low, high, strict=True)]
        if 0 in sizes:
            return torch.empty([0] * len(tile), dtype=self.dtype), tuple(slice(0, 0) for _ in tile)
        base += sum(one * stride for one, stride in zip(low, strides, strict=True)) * self.dtype.itemsize
        count = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        inside = tuple(slice(one - begin, last - begin) for one, last, begin in zip(low, high, first, strict=True))
        return _memory(base, count, self.dtype).as_strided(sizes, strides), inside


class Memory:
    """Shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)

    def index(self, at: int) -> Memory:
        return Memory(self.tensor[int(at)])

    def slice(self, first: int, count: int, dim: int) -> Memory:
        return Memory(self.tensor.narrow(dim, first, count))

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.tensor.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return _values(self.tensor.clone())

    def store(self, values: torch.Tensor) -> None:
        self.tensor.copy_(values)


class Barrier:
    """An mbarrier, or several."""

    def __init__(self, shape: list[int], changed: Condition) -> None:
        self._each = [Barrier([], changed) for _ in range(shape[0])] if len(shape) == 2 else []
        self._changed, self._phase = changed, 0

    def index(self, at: int) -> Barrier:
        return self._each[int(at)]

    def init(self, count: int) -> None:
        self._count = self._missing = count
        self._bytes = 0

    def add(self, arrivals: int, nbytes: int) -> None:
        with self._changed:
            self._missing -= arrivals
            self._bytes += nbytes
            if self._missing == 0 and self._bytes == 0:
                self._phase, self._missing = self._phase + 1, self._count
                self._changed.notify_all()

    def wait(self, phase: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._phase & 1 != phase, _WAIT_S), "a wait does not end"


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype is torch.int64:
        return Barrier(shape, _here.changed)
    return Memory(torch.full(shape, float("nan"), dtype=dtype))


def _copy_in(desc: Descriptor, place: list[int], barrier: Barrier, memory: Memory) -> None:
    rows, inside = desc.rows(place)
    tile = memory.tensor.zero_()
    tile.view(desc.block_type.shape)[(..., *inside)] = rows
    barrier.add(0, -desc.block_type.nbytes)


def _copy_out(desc: Descriptor, place: list[int], memory: Memory) -> None:
    rows, inside = desc.rows(place)
    rows.copy_(memory.tensor.view(desc.block_type.shape)[(..., *inside)].view(rows.shape))


def _product(a: Any, b: Memory, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    a = a.tensor if isinstance(a, Memory) else a
    return _values((acc if use_acc else 0.0) + a.float() @ b.tensor.float())


def _where(condition: Any, one: Any, other: Any) -> Any:
    return torch.where(condition, one, other) if isinstance(condition, torch.Tensor) else one if condition else other


def _least(a: Any, b: Any) -> Any:
    return torch.minimum(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return torch.maximum(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else max(a, b)


def _inline(assembly: str, given: list[torch.Tensor]) -> torch.Tensor:
    assert assembly.startswith("rcp.approx.ftz.f32"), assembly
    return 1.0 / given[0]


def _specialize(partitions: list[Any], warps: Any, registers: Any) -> None:
    errors: list[BaseException] = []

    def run(function: Any, arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=one) for one in partitions]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]


_LANGUAGE = SimpleNamespace(
    program_id=lambda dim: Int(_here.program[dim]),
    num_programs=lambda dim: Int(_here.grid[dim]),
    arange=lambda first, last, layout=None: _values(torch.arange(first, last)),
    zeros=lambda shape, dtype, layout=None: _values(torch.zeros(shape, dtype=dtype)),
    allocate_shared_memory=_allocate,
    load=_load,
    store=_store,
    where=_where,
    minimum=_least,
    maximum=_most,
    exp2=torch.exp2,
    sum=lambda values, dim: values.sum(dim),
    expand_dims=lambda values, dim: values.unsqueeze(dim),
    convert_layout=lambda values, layout: values,
    to_tensor=Int,
    inline_asm_elementwise=lambda asm, operands, given, *rest: _inline(asm, given),
    cast=lambda value, dtype: value,
    static_range=range,
    warp_specialize=_specialize,
    SliceLayout=lambda dim, layout: None,
    NVMMADistributedLayout=lambda *args: None,
    DotOperandLayout=lambda *args: None,
    float32=torch.float32,
    int64=torch.int64,
    constexpr=int,
)
_NAMES = {
    "gl": _LANGUAGE,
    "tl": _LANGUAGE,
    "mbarrier": SimpleNamespace(
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, nbytes: barrier.add(1, nbytes),
        arrive=lambda barrier, pred=True: barrier.add(1, 0) if pred else None,
        wait=lambda barrier, phase: barrier.wait(phase),
        MBarrierLayout=lambda: None,
    ),
    "tma": SimpleNamespace(store_wait=lambda pending: None),
    "tma_load": _copy_in,
    "tma_store": _copy_out,
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": lambda pending, values: values[0] if len(values) == 1 else values,
    "fence_async_shared": lambda: None,
    "barrier": lambda: None,
    "reinterpret": lambda memory, dtype, shape, layout: Memory(memory.tensor.view(-1)[: torch.Size(shape).numel()].view(shape)),
}
_FOUND: dict[int, Any] = {}  # by the dictionary of a module or the function


def as_python(function: Any) -> Any:
    """A kernel or a device function that Python runs."""
    plain = function.fn
    if id(plain) not in _FOUND:
        _FOUND[id(plain)] = FunctionType(plain.__code__, _namespace(plain.__globals__), plain.__name__, plain.__defaults__)
    return _FOUND[id(plain)]


def _namespace(names: dict[str, Any]) -> dict[str, Any]:
    if id(names) not in _FOUND:
        made = _FOUND[id(names)] = dict(names)
        for name, value in names.items():
            if name in _NAMES:
                made[name] = _NAMES[name]
            elif isinstance(value, JITFunction):
                made[name] = as_python(value)
            elif type(value).__name__ == "constexpr":
                made[name] = value.value
            elif type(value).__name__ == "ConstexprFunction":
                made[name] = lambda *args: None
            elif getattr(value, "_field_defaults", None):
                defaults = [getattr(one, "value", one) for one in value._field_defaults.values()]
                made[name] = namedtuple(name, value._fields, defaults=defaults)  # type: ignore[misc]
    return _FOUND[id(names)]


class CpuBuild:
    """Stands in for ``ops.launch.Build``: a launch runs every program, one after another."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        self._function, self._like = as_python(function), arguments

    def bound(self, grid: tuple[int, int, int], *last: Any) -> Any:
        return lambda *args: self._launch(grid, (*args, *last))

    def encoder(self, index: int, template: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return lambda given: (
            Descriptor(template, given if isinstance(given, int) else given.data_ptr(), tuple(shape), tuple(strides)),
        )

    def _launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        given = [
            Address(one, like.dtype) if isinstance(like, Pointer) and one is not None else Int(one) if type(one) is int else one
            for one, like in zip(arguments, self._like, strict=True)
        ]
        with _disable_current_modes():
            for program in product(*map(range, grid)):
                _here.program, _here.grid, _here.changed = program, grid, Condition()
                self._function(*given)
