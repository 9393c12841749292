"""Inputs of one call: the same Case gives the same ones in every process, the worker's and the oracle's. Tensors go from one to
the other as bytes in a file between processes, as themselves within one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from flashmoe_science.contract import Contract, unit_roundoff
from flashmoe_science.problem import Problem
from flashmoe_science.records import Cache

Tensors = dict[str, torch.Tensor]

MAX_SETS = 6000  # calls in one CUDA graph; [1, 1, 64, 64] in fp16 needs 5121 sets for twice the 60 MiB L2 of an H200
_NUDGE = 8.0  # of a standard normal number: visible in the result, and exact in every dtype
PART = 2**24  # elements of a tensor that are widened at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

T = TypeVar("T")


class Case(NamedTuple):
    """The values of the inputs. ``scale`` multiplies the floating ones and is exact in every dtype. A child gets a case as a
    list."""

    seed: int
    distribution: str = "normal"
    scale: float = 1.0
    variant: str = ""  # of the contract
    nudged: bool = False  # one element of the first floating input is another


def varied(contract: Contract, case: Case) -> Contract:
    """The contract, or the variant of it, that a case is for."""
    return contract.variant(case.variant) if case.variant else contract


def make(contract: Contract, problem: Problem, device: torch.device, case: Case) -> Tensors:
    """The inputs of a case, as the contract makes them, in new memory. Raises TypeError: the contract gives something else than
    tensors by name."""
    made = contract.inputs(problem, device, torch.Generator(device).manual_seed(case.seed))
    if not isinstance(made, dict) or not all(isinstance(one, torch.Tensor) for one in made.values()):
        raise TypeError(f"inputs() of contract {contract.name} must return a dict of tensors by name")
    made = contract.vary(case.distribution, made)
    for tensor in (one for one in made.values() if is_scaled(one) and case.scale != 1.0):
        tensor.mul_(case.scale)
    if case.nudged:
        first = next(tensor for tensor in made.values() if tensor.is_floating_point())
        first[np.unravel_index(case.seed % first.numel(), first.shape)] += _NUDGE  # PyTorch's own imports SymPy
    return made


def disturb(tensors: Tensors, seed: int) -> None:
    """Make half of the elements that a scale multiplies a little smaller, so that sums are rounded anew: in fp32 by 2^-17,
    which shows also in a sum fifty times as large as its terms; in 16 bits by one place. In 16 bits equal elements stay equal:
    on inputs that are all the same a kernel's fp32 sums are exact, and stay exact."""
    for tensor in filter(is_scaled, tensors.values()):
        if tensor.dtype == torch.float32:
            generator = torch.Generator(tensor.device).manual_seed(seed)
            moved = torch.rand(tensor.shape, device=tensor.device, generator=generator) < 0.5
        else:
            moved = bits(tensor) * (2 * Random(seed).getrandbits(14) + 1) < 0
        smaller = tensor * (1.0 - max(2.0**-17, unit_roundoff(tensor.dtype)))
        write(tensor, torch.where(moved, smaller, tensor))


def is_scaled(tensor: torch.Tensor) -> bool:
    """Whether the scale of a case multiplies the tensor; not floats of 8 bits, which have scales of their own."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The results of a call, whether it returned one or several."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def kind_of(one: Any) -> str:
    """ "Tensor" for a plain tensor in memory of its own device; else a description of what it is."""
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


def write(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write ``values`` to a tensor, whose dimensions of stride 0 hold one value for all. Returns the tensor."""
    once = tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())
    tensor[once].copy_(values[once])
    return tensor


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory; 0 where it has none."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + reach if tensor.numel() else 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, which NaN does not keep from being equal."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@dataclass(frozen=True, slots=True)
class InputSets(Generic[T]):
    """Inputs to be used in turn. ``cache`` is "cold" where all sets are more than twice the L2, so that a set's lines are gone
    when its turn comes again; the sets of a tiny problem cannot be so large, and are "warm"."""

    sets: tuple[T, ...]
    cache: Cache
    turns: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def next(self) -> T:
        """The next set in turn. All samplers of a problem share its turns: with turns of its own, one of two kernels would
        meet the sets that the other has just used, still in the host's cache (5% of an eager call)."""
        return self.sets[next(self.turns) % len(self.sets)]


def sets_beyond(l2_bytes: int, set_bytes: int) -> int:
    """How many sets are together more than twice the L2; at least two, so that no call repeats the call before it."""
    return max(2, 2 * l2_bytes // set_bytes + 1)


def in_parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same elements of tensors of one shape, at most ``PART`` elements at a time, in order: temporaries of the
    whole tensors of a large problem might not fit beside its references."""
    first = tensors[0]
    if first.numel() <= PART:
        yield tensors
        return
    rows = max(1, PART * len(first) // first.numel())
    for some in zip(*(one.split(rows) for one in tensors), strict=True):
        yield from in_parts(*(one[0] for one in some)) if rows == 1 else [some]


Kind = tuple[tuple[int, ...], torch.dtype]  # a shape and a dtype


class Files:
    """Tensors as bytes in files, by name: only numbers are read, never an object of the other process."""

    def put(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        with Path(name).open("wb") as file:
            for tensor in tensors:
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def get(self, name: str, kinds: Sequence[Kind], device: torch.device) -> tuple[list[torch.Tensor], str]:
        """The tensors, which must be of these kinds, and a digest of their bits. Raises ValueError: they are of others."""
        raw = Path(name).read_bytes()
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        if len(raw) != sum(sizes):
            raise ValueError(f"it gave {len(raw)} bytes of output; {sum(sizes)} are needed")
        parts = torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).split(sizes)
        tensors = [part.clone().view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, kinds, strict=True)]
        return [one.to(device) for one in tensors], hashlib.blake2b(raw).hexdigest()


class Memory:
    """The tensors themselves, for a worker and an oracle in one process."""

    def __init__(self) -> None:
        self._tensors: dict[str, list[torch.Tensor]] = {}

    def put(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors[name] = [tensor.detach() for tensor in tensors]

    def get(self, name: str, kinds: Sequence[Kind], device: torch.device) -> tuple[list[torch.Tensor], str]:
        """As ``Files.get``; the digest is not safe against forgery."""
        tensors = self._tensors.pop(name)
        if [(tuple(one.shape), one.dtype) for one in tensors] != [(tuple(shape), dtype) for shape, dtype in kinds]:
            raise ValueError("it gave tensors of other shapes or dtypes than those that are needed")
        return [one.to(device) for one in tensors], "/".join(map(_digest, tensors))


Handover = Files | Memory


def _digest(tensor: torch.Tensor) -> str:
    """Two sums over a tensor's bits, one weighted by place: computed on the tensor's own device, in chunks."""
    total = weighted = torch.zeros((), device=tensor.device, dtype=torch.int64)
    first = 1
    for (part,) in in_parts(bits(tensor).reshape(-1)):
        words = part.to(torch.int64)
        places = torch.arange(first, first + words.numel(), device=words.device, dtype=torch.int64)
        total, weighted, first = total + words.sum(), weighted + (words * places).sum(), first + words.numel()
    return f"{int(total)}:{int(weighted)}"
