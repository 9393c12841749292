"""FlashInfer's decoding on tensor cores (``BatchDecodeWithPagedKVCacheWrapper``, FlashAttention-2's algorithm), keys split.

FlashInfer plans on the host, once a step for all layers of a model: here once for each page table and problem, when they are
first seen, and outside of what is timed. A table whose numbers change would need another plan. Lengths are the problem's own.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput, finish
from flashmoe_science.ops.attention.peers import peer_kernel
from flashmoe_science.ops.attention.peers.flashinfer import SMALLEST_PAGE, Pages, absent, page_rows, pages_of
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import launches_of

if TYPE_CHECKING:
    import torch

_SERVED = ("ragged", "page")
_HEAD_DIMS = (64, 128, 256)
_MOST_QUERIES = 16  # of a sequence: a token and drafts; beyond them FlashInfer has a wrapper for prompts


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlashInfer needs a GPU"
    if device.compute_capability < (8, 0):
        return "FlashInfer's decoding on tensor cores needs compute capability 8.0"
    if problem.dtype == "fp32":
        return "FlashInfer takes fp16 and bf16"
    if problem.seqlen_q > _MOST_QUERIES:
        return f"FlashInfer's wrapper for decoding is measured with up to {_MOST_QUERIES} queries a sequence"
    if problem.seqlen_q > 1 and problem.mask != "causal":
        return "FlashInfer's wrapper for decoding gives several queries a causal mask, aligned bottom-right"
    if problem.mask == "causal-topleft":
        return "FlashInfer's wrapper for decoding lets its query see every key"
    if problem.seqlen_q > min(one.keys for one in problem.sequence_lengths()):
        return "FlashInfer's wrapper for decoding needs a key for every query"
    if problem.head_dim != problem.head_dim_v or problem.head_dim not in _HEAD_DIMS:
        return f"FlashInfer's wrapper for decoding takes head dimensions of {', '.join(map(str, _HEAD_DIMS))}, V's the same"
    if not problem.features.page and page_rows(problem.seqlen_k) is None:
        return f"FlashInfer reads pages, and {problem.seqlen_k} keys do not fill whole pages of {SMALLEST_PAGE}"
    return unsupported(problem.features, _SERVED, "FlashInfer's wrapper for decoding, as it is measured here,")


def host_plan(pages: Pages, keys: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The start of each sequence's pages in the list of all, with the total; the list; the rows in each last page."""
    import torch

    rows = pages.k.shape[1]
    counts = [-(-length // rows) for length in keys]
    first = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    listed = torch.cat([row[:count] for row, count in zip(pages.table, counts, strict=True)])
    last = torch.tensor([length - rows * (count - 1) for length, count in zip(keys, counts, strict=True)], dtype=torch.int32)
    return first, listed, last


@functools.cache
def _plans() -> Any:
    """Planned wrappers by page table, which they do not outlive, then by problem and scale."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _plan(inputs: AttentionInputs, pages: Pages) -> Any:
    """A wrapper with memory of its own, of the size that its plan needs."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    problem, device = inputs.problem, inputs.q.device
    plan = host_plan(pages, tuple(one.keys for one in problem.sequence_lengths()))
    sizes = (*plan, problem.heads, problem.heads_kv, problem.head_dim, pages.k.shape[1])
    options = {
        "q_data_type": inputs.q.dtype,
        "kv_data_type": inputs.k.dtype,
        "sm_scale": inputs.softmax_scale,
        "q_len_per_req": problem.seqlen_q,
    }
    some = torch.empty(256, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(some, "NHD", use_tensor_cores=True, backend="fa2")
    needed = wrapper.workspace_size(*sizes, **options)
    wrapper.reset_workspace_buffer(*(torch.empty(max(256, size), dtype=torch.uint8, device=device) for size in needed))
    wrapper.plan(*sizes, **options)
    return wrapper


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    pages = pages_of(inputs)
    rows = inputs.q.transpose(1, 2)
    plans, key = _plans().setdefault(pages.table, {}), (inputs.problem, inputs.softmax_scale)
    if key not in plans:
        plans[key] = _plan(inputs, pages)
    out = plans[key].run(rows.flatten(0, 1), (pages.k, pages.v))
    return finish(inputs, out.view(rows.shape).transpose(1, 2))


KERNEL = peer_kernel(
    name="flashinfer_fa2",
    about="FlashInfer's decoding on tensor cores (flashinfer-python): FlashAttention-2's algorithm, planned on the host",
    supports=supports,
    run=run,
    launches=launches_of("flashinfer::(BatchPrefillWithPagedKVCache|PersistentVariableLengthMergeStates)"),
    absent=absent,
)
