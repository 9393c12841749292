"""TMA descriptors, and the alignment that kernels which copy rows 16 bytes at a time require of a problem and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashmoe_science.hardware.gpus import Gpu, why_no_hopper
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.launch import Build, Encoder

MIN_COPY_ROWS = 8  # the swizzle of shared memory repeats with them
MAX_BLOCK_N = 128
MAX_CAP = 1000  # capped scores are right to 2^-21 of the cap
Parts = tuple[Encoder, Encoder | None]  # of one tensor: a head is held in one tile or in two
_DESCRIPTORS: Cache[tuple[int, ...], tuple[Any, ...]] = Cache(2048)  # by encoders and addresses; maps of some 700 bytes each
_SERIALS, _address = count(), torch.Tensor.data_ptr
Templates = Sequence[TensorDescriptor | None]  # of the tensors' first parts, then of their second


def why_not_in_copies(problem: AttentionProblem) -> str | None:
    """Why rows of a problem cannot be copied to shared memory 16 bytes at a time; None if they can."""
    if problem.dtype == "fp32":
        return "serves fp16 and bf16, not fp32"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8:
            return f"{name} is {dim}; its copies need a multiple of 8"
    return None


def why_not_on_sm90(problem: AttentionProblem, device: Device) -> str | None:
    """Why the 16-bit Hopper kernels cannot serve a problem's device, dtype, widths, soft cap or pages; None if they may."""
    page, cap = problem.features.page, problem.features.softcap
    if reason := why_no_hopper(device) or why_not_in_copies(problem):
        return reason
    if cap > MAX_CAP:
        return f"the soft cap is {cap}; capped scores are right to 2^-21 of it, so it may be {MAX_CAP}"
    if page and (page % MIN_COPY_ROWS or max(page, MAX_BLOCK_N) % min(page, MAX_BLOCK_N)):
        return f"pages of {page} rows; it serves powers of two from {MIN_COPY_ROWS} on and multiples of {MAX_BLOCK_N}"
    return None


def fills_tiles(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Whether full tiles of 64 queries of one head are no fewer than the GPU's processors."""
    return problem.batch * problem.heads * (problem.seqlen_q // 64) >= gpu.sm_count


def rows_of_copy(problem: AttentionProblem, config: Config) -> int:
    """Rows of K or V that one copy brings: a tile's, or a page's where those are fewer."""
    return min(problem.features.page or config["block_n"], config["block_n"])


def check_copied(inputs: AttentionInputs) -> None:
    """Raises CannotServe for a scale, or for the start of a tensor, that kernels with copies of 16 bytes do not take."""
    if inputs.softmax_scale <= 0.0:
        raise CannotServe(f"softmax_scale is {inputs.softmax_scale}; this kernel needs it above 0")
    for name, tensor in (("query", inputs.q), ("key", inputs.k), ("value", inputs.v)):
        if tensor.data_ptr() % 16:
            raise CannotServe(f"{name} does not start at a multiple of 16 bytes; its copies need that")


def copied_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor as copies of 16 bytes take them. Raises CannotServe."""
    of_batch, of_head, of_row, _ = strides
    if (of_batch | of_head | of_row) % 8 == 0 and of_batch > 0 and of_head > 0 and of_row > 0:
        return strides
    for dim, (size, stride) in enumerate(zip(shape[:3], strides, strict=False)):
        if size > 1 and (stride <= 0 or stride % 8):
            raise CannotServe(f"{name} has stride {stride} in dimension {dim}; its copies need a multiple of 8")
    # A dimension of size 1 is never stepped over; the copy engine wants a valid stride all the same.
    return (*(8 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False)), 1)


def value_parts(head_dim_v: int) -> tuple[int, ...]:
    """Widths of the tiles that hold a head of V and of O in chunk_gluon_sm90: one up to 128, as two products P V of
    64 columns or fewer take longer than one of 128."""
    return head_parts(head_dim_v) if head_dim_v > 128 else (padded_head_dim(head_dim_v),)


def encoders_of(build: Build, templates: Templates, tensor: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Parts:
    """Encoders of the parts of the ``tensor``-th of a build's tensors, of that shape and strides."""
    second = tensor + len(templates) // 2
    first, rest = templates[tensor], templates[second]
    assert first is not None
    encode = build.encoder(tensor, first, shape, strides)
    if rest is None:
        return encode, None
    return encode, build.encoder(sum(one is not None for one in templates[:second]), rest, shape, strides)


def cached_descriptors(encoders: Sequence[Parts]) -> Callable[..., tuple[Any, ...]]:
    """describe(*tensors): ``descriptors_of``, kept by all addresses: a model's tensors come back to them step by step."""
    serial = next(_SERIALS)

    def describe(*tensors: torch.Tensor) -> tuple[Any, ...]:
        key = (serial, *map(_address, tensors))
        found = _DESCRIPTORS.get(key)
        if found is None:
            found = _DESCRIPTORS[key] = descriptors_of(encoders, tensors)
        return found

    return describe


def descriptors_of(encoders: Sequence[Parts], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The descriptors of the tensors' first parts, then of their second."""
    values: list[Any] = []
    for (encode, _), tensor in zip(encoders, tensors, strict=True):
        values += encode(tensor)
    for (_, rest), tensor in zip(encoders, tensors, strict=True):
        values += (None,) if rest is None else rest(tensor)
    return tuple(values)
