"""Runs Gluon and Triton kernels as they are written, without compiling them: tensors are PyTorch's, partitions are threads.

What a kernel computes, where it reads and writes, and what waits for what are those of the source. Shared memory begins as NaN.
Copies take effect at once; one that leaves its tensor other than by the rules of the copy engine is an error. So is a wait that
does not end, and a barrier with more arrivals or bytes than it counts. Programs run one after another, so that none may wait
for a later one; the first takes most tiles of a counter. Layouts, and what a GPU may order otherwise between two barriers, are
not seen.
"""

from __future__ import annotations

import ctypes
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from math import prod
from threading import Condition, Thread, local
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from tests.unit.ptx import run_block
from torch.utils._python_dispatch import _disable_current_modes
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

from flashmoe_science.ops.descriptors import MOST_ROWS, RAGGED_ROWS
from flashmoe_science.ops.launch import Pointer

WAIT_S, MOST_READS = 60, 20_000
_partition = local()  # its threads
_run = SimpleNamespace()  # of the program that runs: its indices, the grid, the condition of all barriers, what failed


class Int(int):
    """A number of a program. Divisions round towards 0, as Triton's do."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return _values(torch.tensor(int(self), dtype=torch.int32).view(dtype)) if bitcast else self

    def __floordiv__(self, other: int) -> Int:
        assert other > 0
        return Int(-(-int(self) // other) if self < 0 else int(self) // other)

    def __mod__(self, other: int) -> Int:
        return self - self // other * other


def _arithmetic(whole: Callable[..., Any]) -> Callable[..., Any]:
    return lambda one, other: found if (found := whole(one, other)) is NotImplemented else Int(found)


for _name in ("add", "sub", "mul", "and", "xor", "lshift"):
    for _each in (f"__{_name}__", f"__r{_name}__"):
        setattr(Int, _each, _arithmetic(getattr(int, _each)))


_TO, _TYPE = torch.Tensor.to, SimpleNamespace(layout=None)
# What a tensor has while programs run, whom no operation changes it. A subclass's operations take three times as long.
_TENSORS: dict[str, Any] = {
    **{f"__i{name}__": getattr(torch.Tensor, name) for name in ("add", "sub", "mul")},
    "__iand__": torch.Tensor.__and__,
    "__mod__": torch.Tensor.fmod,
    "__floordiv__": lambda self, other: torch.div(self, other, rounding_mode="trunc"),
    "split": lambda self: self.unbind(-1),
    "to": lambda self, dtype, bitcast=False: self.view(dtype) if bitcast else _TO(self, dtype),
    "type": _TYPE,
}


@contextmanager
def _tensors_of_programs() -> Iterator[None]:
    with ExitStack() as after:
        for name, value in _TENSORS.items():
            own = vars(torch.Tensor).get(name)
            after.callback(setattr, torch.Tensor, name, own) if own else after.callback(delattr, torch.Tensor, name)
            setattr(torch.Tensor, name, value)
        yield


def _values(tensor: torch.Tensor) -> Any:
    """What a program has of a tensor: of one integer an Int."""
    return tensor if tensor.dim() or tensor.is_floating_point() else Int(tensor)


class Address:
    """Numbers at an address, and which of them."""

    def __init__(self, base: int, element: torch.dtype, at: Any = 0) -> None:
        element = torch.uint8 if element == torch.float8_e8m0fnu else element  # PyTorch cannot index such a tensor
        self.base, self.element, self.at = base, element, at
        self.dtype = SimpleNamespace(element_ty=element)

    def __add__(self, more: Any) -> Address:
        return Address(self.base, self.element, self.at + more)

    def has(self, at: int) -> bool:
        """Whether the tensor that was given to ``address_of`` has the number."""
        return at >= 0 and (at + 1) * self.element.itemsize <= _BYTES.get(self.base, float("inf"))

    def reach(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers up to the last that the mask allows, which of them it allows, and the mask."""
        at, mask = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(mask))
        at = at[mask]
        assert not at.numel() or (self.has(int(at.min())) and self.has(int(at.max()))), "it is outside of the tensor"
        return _memory(self.base, int(at.max()) + 1 if at.numel() else 0, self.element), at, mask


_BYTES: dict[int, int] = {}  # by address, from there to the end of the tensor's memory


def address_of(tensor: torch.Tensor) -> int:
    """For ``Build``: kernels must not leave the tensor's memory."""
    address, memory = tensor.data_ptr(), tensor.untyped_storage()
    _BYTES[address] = memory.data_ptr() + memory.nbytes() - address
    return address


def by_address(product: Any) -> Any:
    """A product whose launch is given tensors, and takes addresses."""

    def bind(counts: Any) -> Any:
        start = product(counts)
        return lambda *given: start(*[address_of(one) if isinstance(one, torch.Tensor) else one for one in given])

    return bind


def _memory(base: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(base), dtype=dtype)


def _load(address: Address, mask: Any = True, other: Any = None) -> Any:
    if isinstance(address.at, int) and mask is True:  # as most are; the rest takes longer
        assert address.has(address.at), "it is outside of the tensor"
        return _values(_memory(address.base, address.at + 1, address.element)[address.at].clone())
    numbers, at, mask = address.reach(mask)
    found = _full(list(mask.shape), address.element, other)
    found[mask] = numbers[at]
    return _values(found)


def _store(address: Address, values: Any, mask: Any = True) -> None:
    numbers, at, mask = address.reach(mask)
    numbers[at] = torch.as_tensor(values).expand(mask.shape)[mask].to(address.element)


def _atomic_add(address: Address, value: int, sem: str) -> Any:
    old = _load(address)
    if value == 0:  # in a loop that waits for another number
        last, times = getattr(_partition, "read", (None, 0))
        _partition.read = (address.base, address.at, old), times + 1 if last == (address.base, address.at, old) else 0
        assert times < MOST_READS, "a wait for another program does not end"
    _store(address, old + value)
    return old


class Descriptor:
    """A tensor as the copy engine sees it."""

    layout = None

    def __init__(self, template: TensorDescriptor, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.dtype, tile = template.base.dtype, list(template.block_shape)
        self.block_type = SimpleNamespace(shape=tile, nbytes=self.dtype.itemsize * prod(tile))
        self._address, self._shape, self._strides = address, shape, strides
        assert len(tile) == len(shape) == len(strides) <= 5
        assert strides[-1] == 1
        assert all(one % 16 == 0 for one in (address, *(stride * self.dtype.itemsize for stride in strides[:-1])))

    def part(self, place: list[Any], memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a tile at a place, which shared memory is for, what is in the tensor: there, and in shared memory."""
        first, size = list(map(int, place)), self.dtype.itemsize
        assert memory.shape == self.block_type.shape
        assert first[-1] * size % 16 == 0, "the copy engine begins at a multiple of 16 bytes"
        assert self._shape[0] != MOST_ROWS or first[0] == RAGGED_ROWS.value
        low = [max(one, 0) for one in first]
        ends = [min(one + count, most) for one, count, most in zip(first, memory.shape, self._shape, strict=True)]
        sizes = [max(end - begin, 0) for begin, end in zip(low, ends, strict=True)]
        inside = [slice(begin - one, begin - one + count) for begin, one, count in zip(low, first, sizes, strict=True)]
        here = memory.tensor[tuple(inside)]
        if 0 in sizes:
            return torch.empty_like(here), here
        start = self._address + sum(one * stride for one, stride in zip(low, self._strides, strict=True)) * size
        count = sum((many - 1) * stride for many, stride in zip(sizes, self._strides, strict=True)) + 1
        return _memory(start % 2**64, count, self.dtype).as_strided(sizes, self._strides), here


class Memory:
    """Shared memory."""

    layout = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    shape = property(lambda self: list(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)
    numel = property(lambda self: self.tensor.numel())

    def index(self, at: int) -> Memory:
        return Memory(self.tensor[int(at)])

    def slice(self, first: int, count: int, dim: int) -> Memory:
        return Memory(self.tensor.narrow(dim, first, count))

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.tensor.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, values: torch.Tensor) -> None:
        assert list(values.shape) == self.shape
        self.tensor.copy_(values)


class Described:
    """A stage of shared memory as a descriptor has it (device/wide.py): bytes / 16 after the first one's."""

    def __init__(self, memory: Memory, at: int = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, more: int) -> Described:
        return Described(self.memory, self.at + more)

    def tile(self) -> torch.Tensor:
        stage, rest = divmod(self.at * 16, self.memory.tensor[0].nbytes)
        assert rest == 0
        return self.memory.tensor[stage].flatten(0, -2)


class Barrier:
    """An mbarrier, or several."""

    def __init__(self, shape: list[int]) -> None:
        self.shape, self._each = shape, [Barrier([]) for _ in range(shape[0])] if len(shape) == 2 else []
        self._changed, self._phase = _run.changed, 0

    def index(self, at: int) -> Barrier:
        return self._each[int(at)]

    def init(self, count: int) -> None:
        self._count = self._missing = count
        self._bytes = 0

    def add(self, arrivals: int, nbytes: int) -> None:
        with self._changed:
            self._missing, self._bytes = self._missing - arrivals, self._bytes + nbytes
            assert self._missing >= 0, "a barrier has more arrivals than it counts"
            assert self._bytes >= 0, "a barrier has more bytes than it expects"
            if self._missing == self._bytes == 0:
                self._phase, self._missing = self._phase + 1, self._count
                self._changed.notify_all()

    def wait(self, phase: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self._phase & 1 != phase or _run.failed, WAIT_S)
            assert not _run.failed, "another partition failed"
            assert done, "a wait does not end"


def _full(shape: list[int], dtype: torch.dtype, value: Any = None) -> torch.Tensor:
    """Without a value of what is no number."""
    none = torch.nan if dtype.is_floating_point else 255 if dtype is torch.uint8 else -1
    return torch.full(shape, none if value is None else value, dtype=dtype)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    return Barrier(shape) if dtype is torch.int64 else Memory(_full(shape, dtype))


def _copy_in(desc: Descriptor, place: list[Any], barrier: Barrier, memory: Memory, pred: Any = True) -> None:
    if pred:
        memory.tensor.zero_()
        there, here = desc.part(place, memory)
        here.copy_(there)
        barrier.add(0, -desc.block_type.nbytes)


def _copy_out(desc: Descriptor, place: list[Any], memory: Memory) -> None:
    there, here = desc.part(place, memory)
    there.copy_(here)


def _copy_add(desc: Descriptor, place: list[Any], memory: Memory) -> None:
    there, here = desc.part(place, memory)
    there.add_(here)


def _product(a: Any, b: Any, acc: torch.Tensor, use_acc: Any = True, is_async: bool = False) -> Any:
    a, b = (one.tensor if isinstance(one, Memory) else one for one in (a, b))
    return _values((acc if use_acc else 0.0) + a.float() @ b.float())


def _wide_product(a: torch.Tensor, sums: tuple[torch.Tensor, ...], b: Described, dtype: torch.dtype) -> Any:
    whole = torch.cat(sums, 1)
    whole = whole + a.to(dtype).float() @ b.tile()[:, : whole.shape[1]].float()
    return whole.tensor_split(len(sums), 1)


def _where(condition: Any, one: Any, other: Any) -> Any:
    if any(isinstance(given, torch.Tensor) for given in (condition, one, other)):
        return torch.where(torch.as_tensor(condition), one, other)
    found = one if condition else other
    return Int(found) if type(found) is int else found


def _extreme(of_tensors: Callable[..., torch.Tensor], of_numbers: Callable[..., int]) -> Callable[[Any, Any], Any]:
    return lambda a, b: of_tensors(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else of_numbers(a, b)


_ASSEMBLY = {"mov.b32": lambda values: values, "ex2.approx.ftz.f32": torch.exp2, "rcp.approx.ftz.f32": torch.reciprocal}


def _assembly(text: str, constraints: str, given: list[Any], dtypes: Any, is_pure: bool, pack: int) -> Any:
    if text.startswith("{"):
        given = [one.int() if one.dtype == torch.int64 else one for one in given]  # whole numbers of a program are of 32 bits
        if isinstance(dtypes, torch.dtype):
            return _values(run_block(text, given, (dtypes,), pack)[0])
        return tuple(map(_values, run_block(text, given, dtypes, pack)))
    if text.startswith("ld.global"):
        nbytes = int(text.split()[0].rpartition(".u")[2]) // 8
        return sum(_load(given[0] + n).to(dtypes) << 8 * n for n in range(nbytes))
    return _ASSEMBLY[text.split()[0]](*given)


def _specialize(partitions: list[Any], warps: Any, registers: Any) -> None:
    def run(function: Any, arguments: Any, warps: int) -> None:
        _partition.threads = 32 * warps
        try:
            function(*arguments)
        except BaseException as error:
            with _run.changed:
                _run.failed.append(error)
                _run.changed.notify_all()

    threads = [Thread(target=run, args=(*one, count)) for one, count in zip(partitions, (4, *warps), strict=True)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if _run.failed:
        raise _run.failed[0]


_LAYOUT = SimpleNamespace(parent=None, get_default_for=lambda *args: None)
_LAYOUTS = (
    *("BlockedLayout", "DistributedLinearLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMADistributedLayout"),
    "DotOperandLayout",
)
_DTYPES = ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
_LANGUAGE = SimpleNamespace(
    **dict.fromkeys(_LAYOUTS, lambda *args: _LAYOUT),
    **{name: getattr(torch, name) for name in (*_DTYPES, "sigmoid", "erf", "exp", "exp2", "log2")},
    NVMMASharedLayout=_LAYOUT,
    program_id=lambda dim: Int(_run.program[dim]),
    num_programs=lambda dim: Int(_run.grid[dim]),
    arange=lambda first, last, layout=None: _values(torch.arange(first, last)),
    full=lambda shape, value, dtype, layout=None: _values(torch.full(shape, value, dtype=dtype)),
    zeros=lambda shape, dtype, layout=None: _values(torch.zeros(shape, dtype=dtype)),
    allocate_shared_memory=_allocate,
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    where=_where,
    minimum=_extreme(torch.minimum, min),
    maximum=_extreme(torch.maximum, max),
    abs=torch.abs,
    zeros_like=torch.zeros_like,
    sum=lambda values, dim=0: _values(values.sum(dim)),
    max=lambda values, dim: _values(values.amax(dim)),
    min=lambda values, dim: _values(values.amin(dim)),
    expand_dims=torch.unsqueeze,
    broadcast=torch.broadcast_tensors,
    broadcast_to=torch.broadcast_to,
    clamp=lambda values, low, high, propagate_nan: _values(torch.clamp(values, low, high)),  # which keeps what is no number
    PropagateNan=PropagateNan,
    math=SimpleNamespace(div_rn=torch.div),
    div_rn=torch.div,
    float8e4nv=torch.float8_e4m3fn,
    join=lambda *two: torch.stack(two, -1),
    gather=lambda values, index, axis: torch.gather(values, axis, index.long()),
    convert_layout=lambda values, layout, assert_trivial=False: values,
    to_tensor=Int,
    inline_asm_elementwise=_assembly,
    cast=lambda value, dtype: value,
    static_range=range,
    static_assert=bool,
    warp_specialize=_specialize,
    constexpr=int,
)
_NAMES = {
    "gl": _LANGUAGE,
    "tl": _LANGUAGE,
    "mbarrier": SimpleNamespace(
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, nbytes, pred=True: barrier.add(1, nbytes) if pred else None,
        arrive=lambda barrier, pred=True: barrier.add(1, 0) if pred else None,
        wait=lambda barrier, phase: barrier.wait(phase),
        MBarrierLayout=lambda: None,
    ),
    "tma": SimpleNamespace(store_wait=lambda pending: None),
    "tma_load": _copy_in,
    "tma_store": _copy_out,
    "tma_add": _copy_add,
    "cp_async": lambda memory, address, mask=True: memory.store(_load(address, mask, 0)),
    "cp_async_arrive": lambda barrier, increment_count: barrier.add(_partition.threads, 0),
    "_part_rescaled": lambda part, factor: part * factor[:, None],  # by a vote of a warp
    "warpgroup_mma": _product,
    "mma_v2": _product,
    "descriptor_of": Described,
    "to_wide_operand": lambda values, dtype, columns: values,
    "start_wide_output": _wide_product,
    "warpgroup_mma_wait": lambda pending, values: values[0] if len(values) == 1 else values,
    **dict.fromkeys(("fence_async_shared", "barrier", "tma_stored", "gdc_wait", "gdc_launch_dependents"), lambda: None),
    "reinterpret": lambda memory, dtype, shape, layout: Memory(memory.tensor.view(-1)[: prod(shape)].view(shape)),
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
            elif isinstance(getattr(value, "fn", None), FunctionType):
                made[name] = as_python(value)
            elif type(value).__name__ == "constexpr":
                made[name] = value.value
            elif getattr(value, "_field_defaults", None):
                defaults = [getattr(one, "value", one) for one in value._field_defaults.values()]
                made[name] = namedtuple(name, value._fields, defaults=defaults)  # type: ignore[misc]
    return _FOUND[id(names)]


class Build:
    """Stands in for ``ops.launch.Build``: a launch runs every program, one after another. Pointers are given as addresses."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        self._function, self._like = as_python(function), arguments

    def bound(self, grid: tuple[int, int, int], *last: Any) -> Callable[..., None]:
        return lambda *args: self.launch(grid, *args, *last)

    def encoder(self, index: int, template: TensorDescriptor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        templates = [one for one in self._like if isinstance(one, TensorDescriptor)]
        assert templates[index].block_shape == template.block_shape
        return lambda given: (Descriptor(template, given if isinstance(given, int) else given.data_ptr(), shape, strides),)

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        given = [
            Address(one, like.dtype) if isinstance(like, Pointer) and one is not None else Int(one) if type(one) is int else one
            for one, like in zip(arguments, self._like, strict=True)
        ]
        with _disable_current_modes(), _tensors_of_programs():
            for program in product(*map(range, grid)):
                _run.program, _run.grid, _run.changed, _run.failed = program, grid, Condition(), []
                self._function(*given)
