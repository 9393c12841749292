"""How tensors get from a worker to the oracle: as bytes in a file between processes, as themselves within one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from flashmoe_science.measure.inputs import bits

Kind = tuple[tuple[int, ...], torch.dtype]  # a shape and a dtype


class Handover(Protocol):
    """Tensors by name."""

    def put(self, name: str, tensors: Sequence[torch.Tensor]) -> None: ...

    def get(self, name: str, kinds: Sequence[Kind], device: torch.device) -> tuple[list[torch.Tensor], str]:
        """The tensors, which must be of these kinds, and a digest of their bits.

        Raises:
            ValueError: they have another number of bytes.
        """


class Files:
    """Bytes in files: whatever is read is numbers, never an object of the other process."""

    def put(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        with Path(name).open("wb") as file:
            for tensor in tensors:
                file.write(_bytes(tensor))

    def get(self, name: str, kinds: Sequence[Kind], device: torch.device) -> tuple[list[torch.Tensor], str]:
        raw = Path(name).read_bytes()
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in kinds]
        if len(raw) != sum(sizes):
            raise ValueError(f"it gave {len(raw)} bytes of output; {sum(sizes)} are needed")
        tensors, first = [], 0
        for (shape, dtype), size in zip(kinds, sizes, strict=True):
            flat = torch.from_numpy(np.frombuffer(raw, np.uint8, size, first).copy()).view(dtype)
            first += size
            tensors.append(flat.reshape(shape).to(device))
        return tensors, hashlib.blake2b(raw).hexdigest()


class Memory:
    """The tensors themselves, for a worker and an oracle in one process."""

    def __init__(self) -> None:
        self._held: dict[str, list[torch.Tensor]] = {}

    def put(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._held[name] = [tensor.detach() for tensor in tensors]

    def get(self, name: str, kinds: Sequence[Kind], device: torch.device) -> tuple[list[torch.Tensor], str]:
        held = self._held.pop(name)
        if [(tuple(one.shape), one.dtype) for one in held] != [(tuple(shape), dtype) for shape, dtype in kinds]:
            raise ValueError("it gave tensors of other shapes or dtypes than those that are needed")
        return [one.to(device) for one in held], "/".join(map(_digest, held))


def _bytes(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _digest(tensor: torch.Tensor) -> str:
    """Two sums over a tensor's bits, one weighted by place: computed where the tensor lies, which for gigabytes on a GPU is the
    cheap place. It tells answers apart that no one forged."""
    words = bits(tensor).reshape(-1).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
    return f"{int(words.sum())}:{int((words * places).sum())}"
