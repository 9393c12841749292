"""Checks of the values of lengths, pages and rotary positions: on the CPU, where reading them costs nothing, and on a GPU with
FLASHMOE_CHECK=1 in the environment, for a launch and a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.kernel import AttentionLaunch
from flashmoe_science.ops.attention.call.lengths import Lengths, check_lengths
from flashmoe_science.ops.attention.call.outputs import Result
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, Given, MaybeTensor, Tensors
from flashmoe_science.ops.calls import is_plain
from flashmoe_science.ops.checks import CHECK as CHECK  # append.py takes it from here, and tests set it


def are_readable(*tensors: torch.Tensor | None) -> bool:
    """Whether values may be read at no cost: they are on the CPU, and nothing traces the call."""
    return not torch.compiler.is_compiling() and not _are_on_gpu(tensors) and is_plain(*tensors)


def _are_on_gpu(tensors: Given) -> bool:
    return any(one is not None and one.device.type != "cpu" for one in tensors)


def refuse_lengths(one: Lengths) -> None:
    """Raise ValueError if a sequence is out of bounds, as far as its lengths may be read. A call that a CUDA graph captures
    cannot wait, and is not checked."""
    given = one.given()
    if not given or torch.compiler.is_compiling() or not is_plain(*given):
        return
    if not _are_on_gpu(tuple(given)):
        check_lengths(one)
    elif CHECK and not torch.cuda.is_current_stream_capturing() and _is_wrong(one):
        check_lengths(one.on_cpu())


def _is_wrong(one: Lengths) -> bool:
    """Whether the lengths on a GPU are to be refused, as far as one launch tells."""
    if TRITON_MISSING:
        return True
    from flashmoe_science.ops.attention.device.check_triton import is_wrong  # it brings Triton

    return is_wrong(one)


def with_check(launch: AttentionLaunch, lengths: Callable[..., Lengths], *call: Any) -> AttentionLaunch:
    """The launch, with ``refuse_lengths`` before it in each call; without FLASHMOE_CHECK=1 the launch itself. ``lengths`` takes
    ``call``, the call that the launch was bound to, whose tensors are not kept."""
    if not CHECK:
        return launch
    like = lengths(*call)
    sizes, batch = like.of(), 0 if like.cache_seqlens is None else like.cache_seqlens.shape[0]

    def checked(tensors: Given, scale: float | None, length: int, out: MaybeTensor, lse: MaybeTensor) -> Result | None:
        every = Tensors(*tensors)  # type: ignore[arg-type]  # q, k and v are never None
        seqlens = every.cache_seqlens
        if length != ALL_KEYS:
            seqlens = torch.full((batch,), length, dtype=torch.int32, device=every.q.device)
        refuse_lengths(sizes.of(*every[3:5], seqlens, *every[6:9], None, every.rotary_seqlens))
        return launch(tensors, scale, length, out, lse)

    return checked
