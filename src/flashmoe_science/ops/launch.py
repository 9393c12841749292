"""The short path from Python to a launch: keep the compiled kernel and call its launcher directly.

Triton's JIT binds, specialises and looks up on every call; on an H200 host that is 15 us, its compiled kernel's launcher 5 us
(docs/notes/launch-cost.md). A planned launch skips the first part. It is safe because a plan is only ever used for tensors of
the shapes, strides and 16-byte alignment that it was specialised for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

Encoder = Callable[[torch.Tensor], tuple[Any, ...]]

INTERPRETING = knobs.runtime.interpret  # TRITON_INTERPRET=1, read by Triton itself when a kernel is decorated


def direct_launch(
    function: Any, grid: tuple[int, int, int], example_args: tuple[Any, ...], **options: Any
) -> tuple[Callable[..., None], tuple[Encoder, ...]]:
    """Compile ``function`` for arguments like ``example_args``.

    Returns:
        launch(*args): start the kernel on the current stream. ``args`` are all of the kernel's parameters, in order,
            constexprs included; a pointer may be given as an address, which spares the driver a look-up, and a tensor
            descriptor is given as the values that its encoder makes.
        One encoder for each tensor descriptor among ``example_args``: encoder(tensor) gives the arguments that stand for the
            same descriptor over another tensor of the same shape and strides.
    """
    templates = tuple(arg for arg in example_args if isinstance(arg, TensorDescriptor))
    if INTERPRETING:
        return (lambda *args: function[grid](*args, **options)), ()
    compiled = function.warmup(*example_args, grid=grid, enable_fp_fusion=True, **options)  # 3.10 changes the default
    compiled._init_handles()  # loads the cubin now, not inside the first timed call
    handle, metadata = compiled.function, compiled.packed_metadata
    start: Callable[..., None] = compiled.run
    head: tuple[Any, ...] = (handle, metadata)
    encoders: tuple[Encoder, ...] = tuple(_Described(template) for template in templates)
    entry = _entry_point(compiled.run)
    if entry is not None:
        start, head = entry, (handle, compiled.run.launch_cooperative_grid, compiled.run.launch_pdl, None, None, metadata)
        metas = compiled.metadata.tensordesc_meta
        encoders = tuple(_Encoded(template, meta) for template, meta in zip(templates, metas, strict=True))
    current_stream = torch._C._cuda_getCurrentRawStream
    device = torch.cuda.current_device()
    grid_x, grid_y, grid_z = grid
    runtime = knobs.runtime

    def launch(*args: Any) -> None:
        # The hooks are Triton's own profilers'; they are read at each launch because a profiler may start at any time. With
        # none in it a chain of hooks is left out: to call it empty, twice a launch, takes as long as the launch itself.
        stream, enter, leave = current_stream(device), runtime.launch_enter_hook, runtime.launch_exit_hook
        if not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave):
            start(grid_x, grid_y, grid_z, stream, *head, None, None, None, *args)
        else:
            start(grid_x, grid_y, grid_z, stream, *head, compiled.launch_metadata(grid, stream, *args), enter, leave, *args)

    return launch, encoders


def _entry_point(run: Any) -> Callable[..., None] | None:
    """The C function under the Python wrappers of Triton 3.6's launcher; None for other versions.

    The wrappers allocate scratch memory, which our kernels do not use, and encode tensor descriptors anew at every launch.
    """
    if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
        return None
    entry = run.launch
    if entry.__class__.__name__ == "function":  # wrapped to encode descriptors
        entry = entry.__closure__[entry.__code__.co_freevars.index("launcher")].cell_contents
    return entry  # type: ignore[no-any-return]


class _Described:
    """Encodes to a TensorDescriptor, for launchers that encode it themselves."""

    def __init__(self, template: TensorDescriptor) -> None:
        self._fields = dict(template.__dict__)

    def __call__(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        descriptor = object.__new__(TensorDescriptor)  # its fields were checked when the template was made
        descriptor.__dict__ = self._fields | {"base": tensor}
        return (descriptor,)


class _Encoded:
    """Encodes to what Triton 3.6's C function takes: the copy engine's map, the shape and the strides.

    A map depends only on the address, shape and strides; PyTorch's allocator hands out few addresses, so they are kept.
    """

    _MOST = 256

    def __init__(self, template: TensorDescriptor, meta: Any) -> None:
        self._described, self._meta = _Described(template), meta
        self._kept: dict[int, tuple[Any, ...]] = {}

    def __call__(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        address = tensor.data_ptr()
        encoded = self._kept.get(address)
        if encoded is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._kept) >= self._MOST:
                self._kept.clear()
            encoded = self._kept[address] = tuple(make_tensordesc_arg(self._described(tensor)[0], self._meta))
        return encoded


def can_start_early(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it finishes (programmatic dependent launch, Hopper and newer).

    Such a kernel sets itself up early and waits (``gdc_wait``) before it touches memory, so that nothing can be seen of it but
    the microsecond that it saves. See docs/notes/launch-cost.md.
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return int(triton.next_power_of_2(n))
