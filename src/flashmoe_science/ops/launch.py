"""The short path from Python to a launch: keep the compiled kernel and call its launcher directly.

Triton's JIT binds, specialises and looks up on every call; on an H200 host that is 15 us, its compiled kernel's launcher 5 us
(docs/notes/launch-cost.md). A ``Build`` skips the first part. It is safe because a Build is only used for arguments of the
types, 16-byte alignments and stride classes (``stride_class``) that it was specialised for. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate, count
from typing import Any

import torch
import triton
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import assume, current_gpu
from flashmoe_science.kernel import CompileJob
from flashmoe_science.ops.cache import MAX_PLANS, Cache

Grid = tuple[int, int, int]
Encoder = Callable[[Any], tuple[Any, ...]]  # of a tensor, or of an address where kernels are launched directly
_Fill = Callable[[int, tuple[int, ...], tuple[int, ...]], Any]

INTERPRETING = knobs.runtime.interpret  # TRITON_INTERPRET=1, read by Triton itself when a kernel is decorated
# The launcher of other versions has another entry point; they are launched through Triton's Python wrappers.
DIRECT = triton.__version__.startswith("3.6.")
_MAPS: Cache[tuple[int, int], tuple[Any, ...]] = Cache(4096)  # by encoder and address; some 700 bytes each
_SERIALS = count()
_BUILDS: Cache[Hashable, Build] = Cache(MAX_PLANS)  # by ``kept_build``
_COLLECTED: ContextVar[list[CompileJob] | None] = ContextVar("collected builds", default=None)


def launch_path() -> str | None:
    """None where kernels are launched directly, else in words which slower path a launch takes."""
    if DIRECT:
        return None
    return f"launched through the Python wrappers of Triton {triton.__version__}, some 5 us slower than directly as with 3.6"


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
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


# A tensor as ``Build.launch`` takes it: its address, or itself where kernels are interpreted, of booleans their bytes.
address: Callable[[torch.Tensor], Any] = _as_numbers if INTERPRETING else torch.Tensor.data_ptr


def argument(tensor: torch.Tensor | None) -> Any:
    """``address`` of a tensor, None for none."""
    return None if tensor is None else address(tensor)


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def _allocator(on_gpu: bool) -> Allocate:
    allocators = torch._C._dynamo.guards
    return allocators._empty_strided_cuda if on_gpu else allocators._empty_strided_cpu  # type: ignore[attr-defined, no-any-return]


@cache
def allocator(on_gpu: bool) -> Allocate:
    """allocate(shape, strides, dtype) on the current device, or on the CPU: what Inductor's own code allocates by, in a third
    of the time of ``torch.empty`` (docs/notes/launch-cost.md); by ``torch.empty_strided`` where a mode is on, which sees it."""
    direct, modes, device = _allocator(on_gpu), torch._C._len_torch_dispatch_stack, "cuda" if on_gpu else "cpu"

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if modes():
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return direct(shape, strides, dtype)

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
    allocate, direct, modes = allocator(on_gpu), _allocator(on_gpu), torch._C._len_torch_dispatch_stack
    separate = INTERPRETING or not DIRECT
    one_by_one = [((elements,), (1,), dtype) for elements, dtype in parts]
    ends = list(accumulate(workspace_bytes([part]) for part in parts))
    whole, starts = (ends[-1],), (0, *ends[:-1])

    def take() -> tuple[Any, ...]:
        if separate or modes():
            tensors = [allocate(*one) for one in one_by_one]
            return (tensors, *map(argument, tensors)) if DIRECT else (tensors, *tensors)
        held = direct(whole, (1,), torch.uint8)
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

    def __init__(self, function: Any, arguments: Sequence[Any], **options: Any) -> None:
        self._fills: list[_Fill] | None = None
        collected = _COLLECTED.get()
        if collected is not None:
            collected.append(CompileJob(function, tuple(arguments), options))
        if collected is not None or INTERPRETING:
            self.launch: Callable[..., None] = lambda grid, *args: function[grid](*args, **options)
            self.bound: Callable[..., Callable[..., None]] = lambda grid, *last: lambda *args: self.launch(grid, *args, *last)
            return
        # 3.10 changes the default of enable_fp_fusion. The grid of a warmup is not used.
        compiled = function.warmup(*arguments, grid=(1, 1, 1), enable_fp_fusion=True, **options)
        compiled._init_handles()  # loads the cubin now, not inside the first timed call
        entry = _entry_point(compiled.run)
        if entry is not None:
            self._fills = [_fill_of(meta) for meta in compiled.metadata.tensordesc_meta or ()]
        self.launch, self.bound = _launchers(compiled, entry)

    def encoder(self, index: int, template: TensorDescriptor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Encoder:
        """encoder(tensor): the arguments that stand for the ``index``-th descriptor over a tensor of that shape and strides."""
        if self._fills is None:
            return _described(template, shape, strides)
        return _encoded(self._fills[index], shape, strides)


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
    build = _BUILDS.get((function, key))
    if build is None:
        build = _BUILDS[function, key] = Build(function, arguments, **options)
    return build


def _launchers(
    compiled: Any, entry: Callable[..., None] | None
) -> tuple[Callable[..., None], Callable[..., Callable[..., None]]]:
    """Build.launch and Build.bound of a compiled kernel, by the C function ``entry`` where there is one."""
    start: Callable[..., None] = compiled.run
    head: tuple[Any, ...] = (compiled.function, compiled.packed_metadata)
    if entry is not None:
        run, start = compiled.run, entry
        head = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    current_stream, runtime, device = torch._C._cuda_getCurrentRawStream, knobs.runtime, torch.cuda.current_device()

    def launch(grid: Grid, *args: Any) -> None:
        # The hooks are Triton's own profilers'; they are read at each launch because a profiler may start at any time. With
        # none in it a chain of hooks is left out: to call it empty, twice a launch, takes as long as the launch itself.
        stream, enter, leave = current_stream(device), runtime.launch_enter_hook, runtime.launch_exit_hook
        if not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave):
            start(*grid, stream, *head, None, None, None, *args)
        else:
            start(*grid, stream, *head, compiled.launch_metadata(grid, stream, *args), enter, leave, *args)

    def bound(grid: Grid, *last: Any) -> Callable[..., None]:
        (x, y, z), middle = grid, (*head, None, None, None)

        def begin(*args: Any) -> None:
            enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
            if not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave):
                start(x, y, z, current_stream(device), *middle, *args, *last)
            else:
                launch(grid, *args, *last)

        return begin

    return launch, bound


def _entry_point(run: Any) -> Callable[..., None] | None:
    """The C function under the Python wrappers of Triton 3.6's launcher; None for other versions.

    The wrappers allocate scratch memory, which our kernels do not use, and encode tensor descriptors anew at every launch.
    """
    if not DIRECT or run.global_scratch_size or run.profile_scratch_size:
        return None
    entry = run.launch
    if entry.__class__.__name__ == "function":  # wrapped to encode descriptors
        entry = entry.__closure__[entry.__code__.co_freevars.index("launcher")].cell_contents
    return entry  # type: ignore[no-any-return]


def _described(template: TensorDescriptor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Encoder:
    """Encodes to a TensorDescriptor, for launchers that encode it themselves, without the checks that the template passed."""

    def encode(tensor: torch.Tensor) -> tuple[Any, ...]:
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__ = template.__dict__ | {"base": tensor, "shape": list(shape), "strides": list(strides)}
        return (descriptor,)

    return encode


def _fill_of(meta: Mapping[str, Any]) -> _Fill:
    """fill(address, shape, strides): the copy engine's map of a tensor, out of which it fills with zeros.

    What Triton 3.6's ``make_tensordesc_arg`` calls, with what it looks up for each map looked up once: a new length makes two.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    assert not meta["fp4_padded"]
    fill_tma_descriptor = triton.runtime.driver.active.utils.fill_tma_descriptor
    tile = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
    return lambda address, shape, strides: fill_tma_descriptor(address, *tile, shape, strides, 0)


def _encoded(fill: _Fill, shape: tuple[int, ...], strides: tuple[int, ...]) -> Encoder:
    """Encodes to what Triton 3.6's C function takes: the copy engine's map, the shape and the strides.

    A map depends only on the address, shape and strides; PyTorch's allocator hands out few addresses, so maps are kept.
    """
    serial = next(_SERIALS)

    def encode(tensor: torch.Tensor | int) -> tuple[Any, ...]:
        address = tensor if isinstance(tensor, int) else tensor.data_ptr()
        key = (serial, address)
        encoded = _MAPS.get(key)
        if encoded is None:
            encoded = _MAPS[key] = (fill(address, shape, strides), *shape, *strides)
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
    return int(triton.next_power_of_2(n))
