"""Launches by Triton's C functions, without the Python around them, which takes some 5 us.

That allocates scratch memory, which our kernels do not use, and encodes tensor descriptors anew at every launch. Triton 3.6 has
a C function for each kernel; 3.7 and newer have one for all, which takes a kernel's arguments as one tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from flashmoe_science.ops.private import raw_stream, warn_gone

Describe = Callable[[int, tuple[int, ...], tuple[int, ...]], tuple[Any, ...]]  # of an address, a shape and strides
_FOR_EACH_KERNEL = triton.__version__.startswith("3.6.")


class Direct(NamedTuple):
    """``launch`` and ``bound`` of a build, and what encodes each of the kernel's tensor descriptors for them."""

    launch: Callable[..., None]
    bound: Callable[..., Callable[..., None]]
    describe: list[Describe]


class _Entry(NamedTuple):
    """A C function and what it takes: the grid, the stream, ``head``, metadata, two hooks, ``tail``, a kernel's arguments."""

    start: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]


def direct(compiled: Any) -> Direct | None:
    """Launches of a compiled kernel; None where it needs scratch memory or is instrumented, and, after a warning, where this
    Triton lacks one of the private names that are read here."""
    try:
        run, runtime = compiled.run, knobs.runtime
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            return None
        runtime.launch_enter_hook, runtime.launch_exit_hook, compiled.launch_metadata  # noqa: B018  # read at launches
        describe = [_describe(meta) for meta in compiled.metadata.tensordesc_meta or ()]
        return Direct(*_launchers(compiled, _entry(compiled)), describe)
    except (AttributeError, ImportError, KeyError, ValueError) as gone:
        warn_gone(f"a private name of Triton {triton.__version__} ({gone})", "its Python launches kernels, some 5 us slower")
        return None


def _entry(compiled: Any) -> _Entry:
    run = compiled.run
    head = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if _FOR_EACH_KERNEL:
        start = run.launch
        if start.__class__.__name__ == "function":  # wrapped to encode descriptors
            start = start.__closure__[start.__code__.co_freevars.index("launcher")].cell_contents
        return _Entry(start, (*head, None, None, compiled.packed_metadata), ())
    start = triton.runtime.driver.active.utils.launch
    return _Entry(start, (*head, compiled.packed_metadata), (None, None, run.arg_annotations, run.kernel_signature))


def _launchers(compiled: Any, entry: _Entry) -> tuple[Callable[..., None], Callable[..., Callable[..., None]]]:
    start, head, tail = entry
    current_stream, runtime, device = raw_stream(), knobs.runtime, torch.cuda.current_device()

    # The hooks are Triton's own profilers'; they are read at each launch because a profiler may start at any time. With none in
    # it a chain of hooks is left out: to call it empty, twice a launch, takes as long as the launch itself.
    def launch(grid: tuple[int, int, int], *args: Any) -> None:
        stream, enter, leave = current_stream(device), runtime.launch_enter_hook, runtime.launch_exit_hook
        hooks: tuple[Any, ...] = (None, None, None)
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            hooks = compiled.launch_metadata(grid, stream, *args), enter, leave
        start(*grid, stream, *head, *hooks, *tail, *(args if _FOR_EACH_KERNEL else (args,)))

    def bound(grid: tuple[int, int, int], *last: Any) -> Callable[..., None]:
        (x, y, z), middle = grid, (*head, None, None, None, *tail)

        def begin(*args: Any) -> None:
            enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                launch(grid, *args, *last)
            else:
                start(x, y, z, current_stream(device), *middle, *args, *last)

        def begin_by_tuple(*args: Any) -> None:  # the same once more: a frame between would take 0.2 us
            enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                launch(grid, *args, *last)
            else:
                start(x, y, z, current_stream(device), *middle, (*args, *last))

        return begin if _FOR_EACH_KERNEL else begin_by_tuple

    return launch, bound


def _describe(meta: Mapping[str, Any]) -> Describe:
    """describe(address, shape, strides): the copy engine's map of a tensor, out of which it fills with zeros, and its sizes.

    What Triton's ``make_tensordesc_arg`` gives, with what it looks up for each map looked up once: a new length makes two.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    assert not meta["fp4_padded"]
    utils = triton.runtime.driver.active.utils
    fill = utils.fill_tma_descriptor if _FOR_EACH_KERNEL else utils.fill_tma_descriptor_tiled
    tile = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])
    return lambda address, shape, strides: (fill(address, *tile, shape, strides, 0), *shape, *strides)
