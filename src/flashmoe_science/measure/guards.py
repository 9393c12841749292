"""Guards around memory: NaN around the inputs of a call, and around whatever it allocates."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science.measure.inputs import bits, extent_of, write

GUARD_BYTES = 2**16  # on either side: more than a tile of 128 rows of 256 fp16 numbers; keeps an allocator's alignment
FOR_GUARDS = "for guards around what a kernel allocates"  # the note of an error of memory, see ``worker.callers``
_MOST_FILLED = 2**30  # elements: of a larger tensor what lies between its own is left as it is
_PATTERN = 0xA5  # of the guards around what a call allocates
_ALLOCATES = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


class Guarded:
    """A copy of a tensor (``placed``), with its strides, inside a larger buffer of NaN (or of the largest integer)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        extent, dtype = extent_of(tensor), tensor.dtype
        guard = GUARD_BYTES // tensor.element_size()
        bad = torch.nan if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max
        buffer = torch.empty(extent + 2 * guard, dtype=dtype, device=tensor.device)
        self._sides = (buffer[:guard], buffer[guard + extent :])
        for one in (buffer,) if extent < _MOST_FILLED else self._sides:
            one.fill_(bad)
        self._before = bits(self._sides[0]).clone()  # both sides are alike
        # A view shares its buffer's version counter; a tensor of its own over the same memory does not show what it is.
        self.placed = write(buffer.as_strided(tensor.shape, tensor.stride(), guard), tensor).data

    def overwritten(self) -> bool:
        """Whether anything outside of the tensor was written to."""
        return not all(torch.equal(bits(side), self._before) for side in self._sides)


class GuardedAllocation(TorchDispatchMode):
    """Gives every tensor that PyTorch allocates in its scope memory full of NaN, with a guard on either side.

    It sees what is asked for by ``torch.empty`` and its kin, from Python or C++; not what PyTorch's own operators allocate for
    their results, nor other libraries' memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own
        self._guards: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._allocated(func, args, kwargs)

    def _allocated(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _ALLOCATES and type(result) is torch.Tensor and result.numel():
            return self._within_guards(result)
        return result

    def _within_guards(self, tensor: torch.Tensor) -> torch.Tensor:
        extent = tensor.untyped_storage().nbytes()
        try:
            buffer = torch.full((extent + 2 * GUARD_BYTES,), _PATTERN, dtype=torch.uint8, device=tensor.device)
        except torch.OutOfMemoryError as error:
            error.add_note(FOR_GUARDS)
            raise
        inside = buffer[GUARD_BYTES : GUARD_BYTES + extent]
        if tensor.is_floating_point():
            inside[: extent // tensor.element_size() * tensor.element_size()].view(tensor.dtype).fill_(torch.nan)
        self._guards += [buffer[:GUARD_BYTES], buffer[GUARD_BYTES + extent :]]
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            buffer.untyped_storage(), GUARD_BYTES // tensor.element_size(), tensor.shape, tensor.stride()
        )

    def overrun(self) -> bool:
        """Whether a guard was written to."""
        return any(bool((side != _PATTERN).any()) for side in self._guards)


class _WithoutCompiler(GuardedAllocation):
    """GuardedAllocation for a process that has not loaded PyTorch's compiler. The base class's method would load the compiler,
    which takes a second, only to keep it from compiling this file."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._allocated(func, args, kwargs)


def allocations(guard: bool) -> AbstractContextManager[GuardedAllocation | None]:
    """A context in which allocations are guarded and poisoned, where ``guard`` asks for it."""
    if not guard:
        return nullcontext()
    return GuardedAllocation() if "torch._dynamo" in sys.modules else _WithoutCompiler()
