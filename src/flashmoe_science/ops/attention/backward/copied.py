"""What launches on Hopper share: tensors as the copy engine takes them, and builds by what they are specialised on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.device.tma import copied_strides
from flashmoe_science.ops.descriptors import ragged
from flashmoe_science.ops.launch import Build, Encoder, Pointer

Start = Callable[..., None]
Shape = tuple[tuple[int, ...], tuple[int, ...]]  # with strides
Lengths = tuple[Pointer | None, ...]  # of cu_seqlens_q, cu_seqlens_k, seqused_k


class Bound(NamedTuple):
    """The launches of a kernel, one after the other, and the encoders of its descriptors."""

    starts: list[Start]
    encoders: tuple[Encoder, ...]


class Builds:
    """The builds of a launcher."""

    def __init__(self) -> None:
        self._builds: dict[Hashable, Build] = {}

    def get(self, key: Hashable, function: Any, arguments: tuple[Any, ...], **options: Any) -> Build:
        """The build for arguments like these; ``key``: all that differs between them in a launcher."""
        build = self._builds.get((function, key))
        if build is None:
            build = self._builds[function, key] = Build(function, arguments, **options)
        return build


def encoders(build: Build, templates: tuple[Any, ...], shapes: tuple[Shape | None, ...]) -> tuple[Encoder, ...]:
    """Of each descriptor, in order; of one that a launch has not, what gives None."""
    numbers, every = count(), zip(templates, shapes, strict=True)
    return tuple((lambda _: (None,)) if shape is None else build.encoder(next(numbers), one, *shape) for one, shape in every)


def encoded(bound: Bound, tensors: tuple[Any, ...]) -> list[Any]:
    """The descriptors of tensors as a launch takes them."""
    return [value for encode, one in zip(bound.encoders, tensors, strict=True) for value in encode(one)]


def shape_of(tensor: torch.Tensor) -> Shape:
    shape = tuple(tensor.shape)
    return shape, copied_strides("it", shape, tensor.stride())


def is_unfit(tensor: torch.Tensor) -> bool:
    """Whether copies of 16 bytes cannot take a tensor as it is."""
    try:
        shape_of(tensor)
    except CannotServe:
        return True
    return tensor.data_ptr() % 16 > 0


def fitting(unfit: Sequence[bool], tensors: Sequence[Any]) -> list[Any]:
    """The tensors, those that are unfit copied: of an expanded gradient, say, that costs little compared with the products."""
    every = zip(tensors, unfit, strict=True)
    return [one.clone(memory_format=torch.contiguous_format) if copied else one for one, copied in every]


def rows_as_copied(shapes: Iterable[Shape | None], sequences: int) -> list[Shape | None]:
    """Shapes and strides of rows; of packed ``sequences``, where there are any, such as end where a copy says."""
    return [ragged(*(of[1:] for of in one)) if sequences and one else one for one in shapes]


def kind_of(lengths: Lengths) -> tuple[bool, ...]:
    """Which of the lengths a call has not, for the key of a build."""
    return tuple([one is None for one in lengths])
