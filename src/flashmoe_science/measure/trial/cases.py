"""Inputs of one call, made alike by whoever needs them: the candidate's process and the oracle's make the same from a Case."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science.contract import Contract
from flashmoe_science.problem import Problem

Tensors = dict[str, torch.Tensor]

GUARD_BYTES = 2**16  # on either side: more than a tile of 128 rows of 256 fp16 numbers; keeps an allocator's alignment
_PATTERN = 0xA5  # of the guards around what a candidate allocates
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Case:
    """Which values the inputs hold. ``scale`` multiplies the floating ones; every dtype holds it, so that nobody rounds it."""

    seed: int
    distribution: str = "normal"
    scale: float = 1.0
    variant: str = ""  # of the contract

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        return cls(**said)


def varied(contract: Contract, case: Case) -> Contract:
    """The contract that a case is held to."""
    return contract.variant(case.variant) if case.variant else contract


def make(contract: Contract, problem: Problem, device: torch.device, case: Case) -> Tensors:
    """The inputs of a case, as the contract makes them, in new memory.

    Raises:
        TypeError: the contract gives something else than tensors by name.
    """
    made = contract.inputs(problem, device, torch.Generator(device).manual_seed(case.seed))
    if not isinstance(made, dict) or not all(isinstance(one, torch.Tensor) for one in made.values()):
        raise TypeError(f"inputs() of contract {contract.name} must return a dict of tensors by name")
    made = contract.vary(case.distribution, made)
    if case.scale != 1.0:
        for tensor in made.values():
            if tensor.is_floating_point():
                tensor.mul_(case.scale)
    return made


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The results of a call, whether it returned one or several."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def kind_of(one: Any) -> str:
    """ "Tensor" for a plain tensor in memory of its own device; else what it is instead, in words."""
    if type(one) is not torch.Tensor:
        return type(one).__name__
    if one.is_nested:
        return "nested tensor"
    if one.layout is not torch.strided:
        return f"tensor of layout {str(one.layout).removeprefix('torch.')}"
    if one.device.type == "meta":
        return "tensor without memory (on the device meta)"
    if one.is_neg() or one.is_conj():
        return "tensor that is negated or conjugated only when it is read"
    if one.numel() and one.untyped_storage().nbytes() < (one.storage_offset() + extent_of(one)) * one.element_size():
        return "tensor whose memory was freed"
    return "Tensor"


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory; 0 where it has none."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + reach if tensor.numel() else 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, which NaN does not keep from being equal."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


class Guarded:
    """The same values and strides in a larger buffer that holds NaN (or the largest integer) all around: ``placed``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        extent = extent_of(tensor)
        guard = GUARD_BYTES // tensor.element_size()
        buffer = torch.full((extent + 2 * guard,), _bad(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
        self._sides = (buffer[:guard], buffer[guard + extent :])
        self._before = bits(self._sides[0]).clone()  # both sides are alike
        # A view shares its buffer's version counter; a tensor of its own over the same memory does not show what it is.
        self.placed = buffer.as_strided(tensor.shape, tensor.stride(), guard).copy_(tensor).data

    def touched(self) -> bool:
        """Whether anything outside of the tensor was written to."""
        return not all(torch.equal(bits(side), self._before) for side in self._sides)


def _bad(dtype: torch.dtype) -> float | int:
    """What nobody may use: NaN, the largest integer, True."""
    return torch.nan if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


class GuardedAllocation(TorchDispatchMode):
    """Gives every tensor that PyTorch allocates in its scope memory full of NaN, with a guard on either side.

    It sees what is asked for by ``torch.empty`` and its kin, from Python or C++; not what PyTorch's own operators allocate for
    their results, nor other libraries' memory.
    """

    _ALLOCATES = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._allocated(func, args, kwargs)

    def _allocated(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self._ALLOCATES and type(result) is torch.Tensor and result.numel():
            return self._within_guards(result)
        return result

    def _within_guards(self, tensor: torch.Tensor) -> torch.Tensor:
        extent = tensor.untyped_storage().nbytes()
        buffer = torch.full((extent + 2 * GUARD_BYTES,), _PATTERN, dtype=torch.uint8, device=tensor.device)
        inside = buffer[GUARD_BYTES : GUARD_BYTES + extent]
        if tensor.is_floating_point():
            inside[: extent // tensor.element_size() * tensor.element_size()].view(tensor.dtype).fill_(torch.nan)
        placed = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            buffer.untyped_storage(), GUARD_BYTES // tensor.element_size(), tensor.shape, tensor.stride()
        )
        self._buffers.append((buffer, extent))
        return placed

    def overrun(self) -> bool:
        """Whether a guard was written to."""
        return any(
            bool((side != _PATTERN).any())
            for buffer, extent in self._buffers
            for side in (buffer[:GUARD_BYTES], buffer[GUARD_BYTES + extent :])
        )


class _WithoutCompiler(GuardedAllocation):
    """The same where PyTorch's compiler is not loaded: the other would load it, a second of every process's time, to keep it
    from compiling the lines of this file."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._allocated(func, args, kwargs)


@contextmanager
def allocations(guard: bool) -> Iterator[GuardedAllocation | None]:
    """Within: allocations guarded and poisoned, where ``guard`` asks for it."""
    if not guard:
        yield None
        return
    mode = GuardedAllocation() if "torch._dynamo" in sys.modules else _WithoutCompiler()
    with mode:
        yield mode
