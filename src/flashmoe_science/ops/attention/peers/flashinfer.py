"""FlashInfer's XQA (``flashinfer-python``): one query a sequence against pages of keys, compiled on first use.

XQA reads the page table and the lengths on the device: a captured graph serves lengths that change. Its kernel for e4m3 caches
on Hopper has one scale for all sequences, which ours have not; 16-bit caches take its kernel for Ampere and newer, launched
early behind the kernel before (programmatic dependent launch), as is its default. It gives no log-sum-exp.
A contiguous cache is given as pages of itself, without a copy, with a table that is made once. The memory in which its
blocks synchronise is made once for each device, as FlashInfer has it: calls on two streams at once would share it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput, finish
from flashmoe_science.ops.attention.peers import peer_kernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import launches_of, not_installed

if TYPE_CHECKING:
    import torch

_SERVED = ("ragged", "page")
_MAJORS = (9, 10, 12)  # compute capabilities that 0.7.2 has the kernel for
_PAGES = (16, 32, 64, 128)  # rows of a page that it is built for
_OF_CONTIGUOUS = (64, 16)  # rows of a page of a contiguous cache: 64 keys, a warp's, are one page or four
SMALLEST_PAGE = _OF_CONTIGUOUS[-1]
_SHARED = (*range(1, 17), 32, 64)  # query heads a key head for which it compiles
_QUERY_BYTES = 16384  # of those heads at the most, each padded to a power of two
_BLOCK_KEYS = 256  # that a block takes at a time: no sequence is split finer
_ROUNDS = (1, 2, 4, 8)  # splits of the keys for that many blocks a processor; 1 is FlashInfer's own choice
_SEMAPHORES = 2**21  # of 4 bytes, one for each sequence and key head: as many as FlashInfer's own decoding reserves
_SCRATCH_BYTES = 2**25  # more than 17 KiB for each of 8 times 188 blocks: queries as above, with their maxima and sums


def absent() -> str | None:
    return not_installed("flashinfer-python", "flashinfer")


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlashInfer's XQA needs a GPU"
    if device.compute_capability[0] not in _MAJORS:
        return f"FlashInfer's XQA needs Hopper or newer; {device.product} is {device.arch}"
    if problem.dtype == "fp32":
        return "FlashInfer's XQA takes fp16 and bf16"
    if problem.seqlen_q != 1:
        return "FlashInfer's XQA is measured with one query a sequence"
    if problem.mask == "causal-topleft":
        return "FlashInfer's XQA lets its query see every key"
    if problem.head_dim != problem.head_dim_v:
        return "FlashInfer's XQA needs head_dim_v equal to head_dim"
    if problem.head_dim % 16:
        return "FlashInfer's XQA needs a head_dim that is a multiple of 16"
    padded = max(64, 1 << (problem.head_dim - 1).bit_length())
    shared = [count for count in _SHARED if 2 * padded * count <= _QUERY_BYTES]
    if problem.heads // problem.heads_kv not in shared:
        more = " or ".join(str(count) for count in shared if count > 16)
        return f"FlashInfer's XQA takes up to 16 query heads a key head, or {more}, at head_dim {problem.head_dim}"
    if problem.features.page and problem.features.page not in _PAGES:
        return f"FlashInfer's XQA takes pages of {', '.join(map(str, _PAGES))} rows"
    if not problem.features.page and page_rows(problem.seqlen_k) is None:
        return f"FlashInfer's XQA reads pages, and {problem.seqlen_k} keys do not fill whole pages of {SMALLEST_PAGE}"
    return unsupported(problem.features, _SERVED, "FlashInfer's XQA, as it is measured here,")


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Configs with as many blocks as SMs, and with more where it then splits keys more: where lengths differ, or sequences do
    not fill the SMs evenly, more blocks may end sooner. Its fastest path is what is compared."""
    processors = 1 if device is None else device.sm_count
    most = -(-problem.seqlen_k // _BLOCK_KEYS)
    splits = {rounds: min(most, max(1, rounds * processors // (problem.batch * problem.heads_kv))) for rounds in _ROUNDS}
    first_of = {count: rounds for rounds, count in reversed(splits.items())}
    return tuple(Config(rounds=rounds) for rounds in sorted(first_of.values()))


@dataclass(frozen=True, slots=True)
class Pages:
    """A cache as FlashInfer has it: K and V are [pages, rows, heads_kv, head_dim], ``table`` is int32 [batch, pages of a
    sequence], ``lengths`` int32 [batch]."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def pages_of(inputs: AttentionInputs) -> Pages:
    """K and V in pages, as views. Raises CannotServe for rows that no strides of pages reach."""
    tensors, k, v = inputs.tensors, inputs.k, inputs.v
    if k.stride() != v.stride() or any(stride % k.shape[3] for stride in k.stride()[:3]):
        raise CannotServe("FlashInfer needs rows of K and V whole heads apart, in both alike")
    if tensors.page_table is not None:
        assert tensors.cache_seqlens is not None
        return Pages(k.transpose(1, 2), v.transpose(1, 2), tensors.page_table, tensors.cache_seqlens)
    if tensors.cache_batch_idx is not None:
        raise CannotServe("FlashInfer takes no index of cache rows")
    batch, heads, capacity, width = k.shape
    rows = page_rows(capacity)
    if rows is None:
        raise CannotServe(
            f"FlashInfer reads pages, and a cache of {capacity} rows does not fill whole pages of {SMALLEST_PAGE}"
        )
    between, between_heads, between_rows, _ = k.stride()
    step, rest = divmod(between, rows * between_rows)  # from the first page of a sequence to the next one's
    if rest:
        raise CannotServe("sequences of the cache are not whole pages apart, as FlashInfer needs")
    # Pages of other sequences, and in [B, H, S, D] of other heads, are between the last page and the one before: a page is all
    # heads of its rows, wherever they are.
    size = ((batch - 1) * step + capacity // rows, rows, heads, width)
    strides = (rows * between_rows, between_rows, between_heads, 1)
    lengths = tensors.cache_seqlens
    table = _table(batch, step, capacity // rows, k.device)
    lengths = _equal_lengths(batch, capacity, k.device) if lengths is None else lengths
    return Pages(k.as_strided(size, strides), v.as_strided(size, strides), table, lengths)


def page_rows(keys: int) -> int | None:
    """Rows of a page for a contiguous cache, None where no page divides it."""
    return next((rows for rows in _OF_CONTIGUOUS if keys % rows == 0), None)


# Never dropped: a captured graph holds their addresses, and they are small.
@functools.cache
def _table(batch: int, step: int, pages: int, device: torch.device) -> torch.Tensor:
    import torch

    first = torch.arange(batch, dtype=torch.int32, device=device) * step
    return first[:, None] + torch.arange(pages, dtype=torch.int32, device=device)


@functools.cache
def _equal_lengths(batch: int, keys: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.full((batch,), keys, dtype=torch.int32, device=device)


@functools.cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch, and semaphores, which begin at 0 and are 0 again after each call."""
    import torch

    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return scratch, torch.zeros(_SEMAPHORES, dtype=torch.uint32, device=device)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    import torch
    from flashinfer.xqa import xqa

    pages, problem, device, gpu = pages_of(inputs), inputs.problem, inputs.q.device, gpu_of(inputs.q)
    assert gpu is not None
    q = inputs.q.transpose(1, 2).contiguous()
    out = torch.empty_like(q)
    scratch, semaphores = _workspace(device)
    xqa(
        q, pages.k, pages.v, pages.table, pages.lengths.view(torch.uint32)[:, None], out, scratch, semaphores,
        problem.heads_kv, pages.k.shape[1],
        q_scale=inputs.softmax_scale * math.sqrt(problem.head_dim),  # it divides by the root by itself
        sm_count=config["rounds"] * gpu.sm_count,
    )  # fmt: skip
    return finish(inputs, out.transpose(1, 2))


KERNEL = peer_kernel(
    name="flashinfer_xqa",
    about="FlashInfer's XQA (flashinfer-python): decoding from pages, no plan on the host",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches_of(r"\bkernel_mha\("),
    absent=absent,
)
