"""The short path from Python to a launch: keep the compiled kernel and call its launcher directly (direct.py).

Triton's JIT binds, specialises and looks up on every call; on an H200 host that is 15 us, its compiled kernel's launcher 5 us
(docs/notes/launch-cost.md). A ``Build`` skips the first part. It is safe because a Build is only used for arguments of the
types, 16-byte alignments and stride classes (``stride_class``) that it was specialised for. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.compiler import hash_callees_first
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import assume, current_gpu
from flashmoe_science.kernel import CompileJob
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.direct import Describe, direct
from flashmoe_science.ops.private import Allocate, dispatch_modes, empty_strided

Grid = tuple[int, int, int]
Encoder = Callable[[torch.Tensor | int], tuple[Any, ...]]  # of a tensor, or of an address

INTERPRETING = knobs.runtime.interpret  # TRITON_INTERPRET=1, read by Triton itself when a kernel is decorated
_WRAPPED: set[str] = set()  # the kernels that Triton's own Python launches
_MAPS: Cache[tuple[int, int], tuple[Any, ...]] = Cache(4096)  # by encoder and address; some 700 bytes each
_SERIALS = count()
_LOADED: set[tuple[int, str]] = set()  # (device, Triton's hash of what was compiled)
_BUILDS: Cache[Hashable, Build] = Cache(MAX_PLANS)  # by ``kept_build``
_COLLECTED: ContextVar[list[CompileJob] | None] = ContextVar("collected builds", default=None)


def launch_path() -> str | None:
    """None where kernels are launched directly, else in words which slower path launches take."""
    return f"launched by the Python of Triton {triton.__version__}, some 5 us slower than directly" if _WRAPPED else None


class Pointer:
    """Stands in for a tensor while a kernel is compiled, when its dtype and its alignment are all that counts."""

    __slots__ = ("_address", "dtype")

    def __init__(self, dtype: torch.dtype, address: int = 0) -> None:
        self.dtype, self._address = dtype, address % 16

    def data_ptr(self) -> int:
        return self._address


def stand_in(tensor: torch.Tensor | None) -> Pointer | None:
    """A Pointer of the tensor's dtype and alignment; None for none."""
    return None if tensor is None else Pointer(tensor.dtype, tensor.data_ptr())


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bool, torch.float8_e8m0fnu) else tensor


# A tensor as ``Build.launch`` takes it: its address, or itself where kernels are interpreted, of booleans and exponents bytes.
address: Callable[[torch.Tensor], Any] = _as_numbers if INTERPRETING else torch.Tensor.data_ptr


def argument(tensor: torch.Tensor | None) -> Any:
    """``address`` of a tensor, None for none."""
    return None if tensor is None else address(tensor)


@cache
def allocator(on_gpu: bool) -> Allocate:
    """allocate(shape, strides, dtype) on the current device, or on the CPU: what Inductor's own code allocates by, in a third
    of the time of ``torch.empty`` (docs/notes/launch-cost.md); by ``torch.empty_strided`` where a mode is on, which sees it."""
    unseen, modes, device = empty_strided(on_gpu), dispatch_modes, "cuda" if on_gpu else "cpu"

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if modes():
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return unseen(shape, strides, dtype)

    return allocate


Part = tuple[int, torch.dtype]  # elements, dtype
_PART_BYTES = 256  # a part begins at a multiple of it, as an allocation of its own would


def workspace_bytes(parts: Sequence[Part]) -> int:
    """Bytes of what ``workspace_allocator`` allocates."""
    return sum(cdiv(elements * dtype.itemsize, _PART_BYTES) * _PART_BYTES for elements, dtype in parts)


def workspace_allocator(on_gpu: bool, parts: Sequence[Part]) -> Callable[[], tuple[Any, ...]]:
    """take(): memory for what stands between the launches of one call. First what holds it, to be kept until the last is
    launched, then each part as an argument of a launch.

    One allocation for all of them; one each where a mode is on, which sees them, and where launches take tensors.
    """
    allocate, unseen, modes = allocator(on_gpu), empty_strided(on_gpu), dispatch_modes
    one_by_one = [((elements,), (1,), dtype) for elements, dtype in parts]
    ends = list(accumulate(workspace_bytes([part]) for part in parts))
    whole, starts = (ends[-1],), (0, *ends[:-1])

    def take() -> tuple[Any, ...]:
        if INTERPRETING or modes():
            tensors = [allocate(*one) for one in one_by_one]
            return (tensors, *map(argument, tensors))
        held = unseen(whole, (1,), torch.uint8)
        base = held.data_ptr()
        return (held, *map(base.__add__, starts))  # no frame, as a comprehension's

    return take


def stride_class(strides: Sequence[int]) -> Hashable:
    """Equal for strides that one build serves: Triton specialises on 1, on multiples of 16 and on the integer's width."""
    bits = 0
    for stride in strides:
        bits |= stride
    if bits % 16 == 0 and bits < 2**31:
        return None  # the usual case
    return tuple((stride == 1, stride % 16 == 0, stride >= 2**31) for stride in strides)


def stride_unit(strides: Sequence[int]) -> int:
    """The power of two in all strides up to 8, or 1 if all are multiples of 16, which Triton looks for by itself.

    A kernel that divides and multiplies a stride by it tells the compiler so, which then reads as many elements at once. Of
    rows of 88 elements it would read one at a time, and spill.
    """
    bits = 0
    for stride in strides:
        bits |= stride
    return min(bits & -bits, 8) if bits % 16 else 1


class Build:
    """A kernel compiled for the current device and for arguments like ``arguments``, ready to be launched there.

    ``arguments`` are all of the kernel's parameters in order, constexprs included, with a ``Pointer`` for each tensor (also as
    the base of a TensorDescriptor): nothing of them is kept.

    ``launch(grid, *args)`` starts the kernel on the current stream. ``args`` are all of its parameters again; a pointer may be
    given as an address, which spares the driver a look-up; a tensor descriptor is given as the values that its encoder makes.
    ``bound(grid, *last)`` gives start(*args): ``launch(grid, *args, *last)``, of which all that stays is put together once.
    """

    launch: Callable[..., None]
    bound: Callable[..., Callable[..., None]]

    def __init__(self, function: Any, arguments: Sequence[Any], **options: Any) -> None:
        self._describe: Sequence[Describe] | None = None
        collected = _COLLECTED.get()
        if collected is not None:
            collected.append(CompileJob(function, tuple(arguments), options))
        if collected is not None or INTERPRETING:
            self._launch_by(function, options)
            return
        hash_callees_first(function)
        # 3.10 changes the default of enable_fp_fusion. The grid of a warmup is not used.
        compiled = function.warmup(*arguments, grid=(1, 1, 1), enable_fp_fusion=True, **options)
        compiled.run  # noqa: B018  # loads the cubin now, not inside the first timed call
        _LOADED.add((torch.cuda.current_device(), compiled.hash))
        if (found := direct(compiled)) is None:
            _WRAPPED.add(function.__name__)
            self._launch_by(compiled, {})
        else:
            self.launch, self.bound, self._describe = found

    def _launch_by(self, kernel: Any, options: dict[str, Any]) -> None:
        """Launch by Triton's own Python."""
        self.launch = lambda grid, *args: kernel[grid](*args, **options)
        self.bound = lambda grid, *last: lambda *args: self.launch(grid, *args, *last)

    def encoder(self, index: int, template: TensorDescriptor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Encoder:
        """encoder(tensor): the arguments that stand for the ``index``-th descriptor over a tensor of that shape and strides."""
        return _encoded(_described(template) if self._describe is None else self._describe[index], shape, strides)


def kernels_loaded() -> int:
    """How many kernels this process has compiled, or found compiled on disk: a Build of one that it has adds none."""
    return len(_LOADED)


@contextmanager
def collect_builds(gpu: Gpu) -> Iterator[list[CompileJob]]:
    """What is built in this context, in order, as on ``gpu``, which need not be here: nothing is compiled."""
    jobs: list[CompileJob] = []
    before = _COLLECTED.set(jobs)
    try:
        with assume(gpu):
            yield jobs
    finally:
        _COLLECTED.reset(before)


def kept_build(key: Hashable, function: Any, arguments: Sequence[Any], **options: Any) -> Build:
    """The Build of ``arguments``, kept for later calls; ``key``, with the function: all that it depends on."""
    if _COLLECTED.get() is not None:
        return Build(function, arguments, **options)
    build = _BUILDS.get((function.fn, key))  # Triton's hash of a kernel is slow
    if build is None:
        build = _BUILDS[function.fn, key] = Build(function, arguments, **options)
    return build


def _described(template: TensorDescriptor) -> Describe:
    """Describes by a TensorDescriptor, which Triton's Python encodes, without the checks that the template passed."""

    def describe(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
        base, descriptor = SimpleNamespace(data_ptr=lambda: address), object.__new__(TensorDescriptor)
        descriptor.__dict__ = template.__dict__ | {"base": base, "shape": list(shape), "strides": list(strides)}
        return (descriptor,)

    return describe


def _encoded(describe: Describe, shape: tuple[int, ...], strides: tuple[int, ...]) -> Encoder:
    """Encodes by ``describe``, for each address once: a map of the copy engine depends on nothing else but the shape and the
    strides, and PyTorch's allocator hands out few addresses."""
    serial = next(_SERIALS)

    def encode(tensor: torch.Tensor | int) -> tuple[Any, ...]:
        address = tensor if isinstance(tensor, int) else tensor.data_ptr()
        key = (serial, address)
        encoded = _MAPS.get(key)
        if encoded is None:
            encoded = _MAPS[key] = describe(address, shape, strides)
        return encoded

    return encode


def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it finishes (programmatic dependent launch, Hopper and newer).

    Such a kernel sets itself up early and waits (``gdc_wait``) before it touches memory, so that nothing can be seen of it but
    the microsecond that it saves. See docs/notes/launch-cost.md.
    """
    gpu = current_gpu(device)
    return gpu is not None and gpu.compute_capability >= (9, 0)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n; 0 of 0. Triton's takes 2 us, as constexprs may come to it."""
    return 1 << (n - 1).bit_length() if n else 0
