"""Results of attention to the keys of each rank, merged by log-sum-exp on every rank: the same bits on all.

Between GPUs of one host a workspace exchanges them in the launch that merges; else a collective comes first. On the CPU, and in
fp64, PyTorch's operators merge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.tensors import DTYPES
from flashmoe_science.ops.attention.peers.merge import merged
from flashmoe_science.ops.checks import check_count
from flashmoe_science.parallel.agree import agreed
from flashmoe_science.parallel.cost import EXCHANGED, MESSAGES, Cost
from flashmoe_science.parallel.layout import process_group
from flashmoe_science.parallel.symmetric import why_no_symmetric
from flashmoe_science.parallel.transport import gathered

_ALIGNED = 16  # bytes: a part and its results begin at multiples of it, which the kernel knows too


class Part(NamedTuple):
    """What a rank sends, in bytes: log-sum-exps, then from ``results`` on results, ``size`` in all."""

    results: int
    size: int

    @classmethod
    def of(cls, rows: int, width: int, dtype: torch.dtype) -> Part:
        results = _aligned(4 * rows)
        return cls(results, results + _aligned(rows * width * dtype.itemsize))

    def filled(self, results: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        made = torch.empty(self.size, dtype=torch.uint8, device=lse.device)
        for first, one in ((0, lse), (self.results, results)):
            made[first : first + one.nbytes].view(one.dtype).copy_(one.flatten())
        return made


class DecodeWorkspace:
    """Buffers by which ``context_decode`` merges the results of one host's GPUs in one launch. All ranks make it together.

    Any number of layers and calls on one stream may share it. CUDA graphs can capture them; all ranks must replay alike. If a
    rank is missing, the wait ends after 60 s with an error that ends the CUDA context: restart all ranks.

    Args:
        group: a ProcessGroup of nccl, or a 1-D DeviceMesh.
        max_batch: the most sequences of a call, times the queries of each.
        heads, head_dim, dtype: of the result: float16, bfloat16 or float32. Calls with other sizes must not need more bytes.

    Raises:
        TypeError, ValueError: no group that this rank is in, or one without NCCL; a size below 1, another dtype; on every rank,
            if the ranks' sizes differ.
        RuntimeError: PyTorch cannot map the ranks' memory into each other's.
    """

    def __init__(
        self, group: object, max_batch: int, heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:  # fmt: skip
        self.group = process_group(group)
        sizes = {"max_batch": max_batch, "heads": heads, "head_dim": head_dim}
        with agreed(self.group) as facts:
            facts |= {**sizes, "dtype": str(dtype)}
            for name, size in sizes.items():
                check_count(size, name, 1)
            if dtype not in DTYPES:
                raise TypeError(f"dtype is {dtype!r}; it must be torch.float16, bfloat16 or float32")
            if why := why_no_symmetric(self.group):
                raise ValueError(f"a DecodeWorkspace is asked for, and {why}")
        from flashmoe_science.parallel.merge import Slots  # it brings Triton

        self.max_bytes = Part.of(max_batch * heads, head_dim, dtype).size
        self._slots = Slots(self.group, self.max_bytes)

    def merge(self, results: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """As ``merge_parts``, in one launch."""
        out = torch.empty_like(results)
        self._slots.merge(results, lse, out)
        return out

    def __repr__(self) -> str:
        return f"DecodeWorkspace({self.group.size()} ranks, parts of at most {self.max_bytes / 1e6:.2f} MB)"


def check_workspace(workspace: object, group: dist.ProcessGroup, part: Part, dtype: torch.dtype) -> None:
    """Raise TypeError, ValueError unless it is a workspace of the group with room for a part, of results of this dtype."""
    if not isinstance(workspace, DecodeWorkspace):
        raise TypeError(f"workspace is {workspace!r}; it must be a DecodeWorkspace or None")
    if (ranks := dist.get_process_group_ranks(workspace.group)) != dist.get_process_group_ranks(group):
        raise ValueError(f"workspace is of a group of ranks {ranks}, and group is another")
    if dtype not in DTYPES:
        raise ValueError(f"workspace is given and the result is {dtype}; it must be float16, bfloat16 or float32")
    if part.size > workspace.max_bytes:
        raise ValueError(f"the part of a rank has {part.size} bytes; the workspace is for at most {workspace.max_bytes}")


def merge_parts(
    group: dist.ProcessGroup, workspace: DecodeWorkspace | None, results: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """The results of all ranks merged, in the shape and dtype of this rank's. Every rank of the group calls it. ``results``:
    [..., width], rounded to its dtype. ``lse``: fp32, one for each row of results, in their order; -inf where a rank has no
    keys: it has no weight."""
    if not results.numel():  # as on every rank
        return results
    results, lse = results.contiguous(), lse.contiguous()
    if workspace is not None:
        return workspace.merge(results, lse)
    part = Part.of(lse.numel(), results.shape[-1], results.dtype)
    (parts,) = gathered(group, part.filled(results, lse))
    parts = parts.view(group.size(), part.size)
    if results.is_cuda and not TRITON_MISSING and results.dtype in DTYPES:
        from flashmoe_science.parallel.merge import merge_gathered  # it brings Triton

        merge_gathered(parts, out := torch.empty_like(results))
        return out
    wide = torch.promote_types(results.dtype, torch.float32)
    outs = parts[:, part.results :][:, : results.nbytes].view(results.dtype).view(-1, *results.shape).to(wide)
    lses = parts[:, : lse.nbytes].view(lse.dtype).view(-1, *results.shape[:-1]).to(wide)
    return merged(outs.unbind(), lses.unbind())[0].to(results.dtype)


def described(group: dist.ProcessGroup, workspace: DecodeWorkspace | None, part: Part) -> str:
    """What merges such parts, and the bytes that a rank receives."""
    received = (group.size() - 1) * part.size
    if workspace is not None:
        return f"parts are merged in one launch through symmetric memory: {Cost.by(EXCHANGED, received)}"
    backend = dist.get_backend(group)
    link = MESSAGES if "nccl" in backend else None
    return f"parts are merged behind a collective of {backend}: {Cost.by(link, received)}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
