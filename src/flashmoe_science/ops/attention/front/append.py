"""The operator ``flashmoe::kv_cache_append``: new keys and values into a cache, with rotary embeddings of them and of queries.

It changes the caches in place and returns the rotated queries and the lengths after it. Our kernel (device/append_triton.py)
serves it on an NVIDIA GPU, PyTorch's operators elsewhere. It has no gradient: neither has FlashAttention's.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.append import Append, check_append
from flashmoe_science.ops.attention.call.lengths import lengths_of_append
from flashmoe_science.ops.attention.call.outputs import strides_like
from flashmoe_science.ops.attention.call.packed import owners
from flashmoe_science.ops.attention.front import lengths
from flashmoe_science.ops.attention.front.padded import wide
from flashmoe_science.ops.calls import is_plain
from flashmoe_science.ops.explain import is_explaining
from flashmoe_science.ops.operator import register


def append_to_cache(append: Append) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new keys, rotated, and the new values behind the first ``cache_seqlens`` of each sequence's cache, in place.
    Returns the rotated q (q itself without rotary), and int32 [batch], the lengths after. Raises TypeError, ValueError: an
    argument that is not allowed, in one line."""
    check_append(append)
    if torch.compiler.is_compiling() or not is_plain(append.k_cache, append.v_cache, append.q, append.k, append.v):
        if is_explaining() and _on_nvidia(append):
            _kernel().bind(append)
        rotated, seqlens = _fake(*append) if is_explaining() else _OPERATOR(*append)
    else:
        rotated, seqlens = _forward(*append)
    return (append.q if append.rotary_cos is None else rotated), seqlens


@torch.no_grad()
def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on CPU and CUDA: the rotated queries, empty where nothing is rotated, and the lengths after."""
    a = Append(*args)
    on_nvidia = _on_nvidia(a)
    if lengths.CHECK or not on_nvidia:
        lengths.refuse_lengths(lengths_of_append(a))
    new = a.k.shape[2] if a.cu_seqlens_k_new is None else a.cu_seqlens_k_new[1:] - a.cu_seqlens_k_new[:-1]
    seqlens = a.cache_seqlens + new
    rotated = _kernel().append(a) if on_nvidia else _by_pytorch(a)
    return a.q.new_empty(0) if rotated is None else rotated, seqlens


def _on_nvidia(a: Append) -> bool:
    """Whether our kernel serves it."""
    return gpu_of(a.q) is not None and not TRITON_MISSING


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of ``_forward`` without the work."""
    a = Append(*args)
    rotated = a.q.new_empty(0)
    if a.rotary_cos is not None:
        rotated = a.q.new_empty_strided(a.q.shape, strides_like(a.q.shape, a.q.stride(), a.q.shape[3]))
    return rotated, torch.empty_like(a.cache_seqlens)


@cache
def _kernel() -> ModuleType:
    """The module of the kernel, which brings Triton: an import of this one need not wait for it."""
    from flashmoe_science.ops.attention.device import append_triton

    return append_triton


_OPERATOR = register(
    "kv_cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, Tensor cache_seqlens, "
    "Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? cu_seqlens_k_new=None, Tensor? cu_seqlens_q=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_seqlens=None, bool rotary_interleaved=True, "
    "bool one_position=False, SymInt max_seqlen_q=0, str table_name='page_table') -> (Tensor q_rotated, Tensor seqlens)",
    _forward,
    _fake,
)


# By PyTorch's operators -------------------------------------------------------------------------------------------------------


def _by_pytorch(a: Append) -> torch.Tensor | None:
    """Append, and rotate the queries where there are rotary tables. As in our kernel, what would lie past the capacity, or in a
    page or a row of the cache that there is not, is not written."""
    sequence, place, owned = _owners(a.k, a.cu_seqlens_k_new)
    if owned is not None:
        sequence, place = sequence[owned], place[owned]
        rows_k, rows_v = (_bytes(one)[0].transpose(0, 1)[owned].view(one.dtype) for one in (a.k, a.v))
    else:
        rows_k, rows_v = (one.transpose(1, 2).flatten(0, 1) for one in (a.k, a.v))
    first = a.cache_seqlens if a.rotary_seqlens is None else a.rotary_seqlens
    if a.rotary_cos is not None:
        rows_k = _rotated(rows_k, a, first.long()[sequence] + place)
    at = a.cache_seqlens.long()[sequence] + place
    page, at = at // a.k_cache.shape[2], at % a.k_cache.shape[2]  # a contiguous cache is one page
    if a.page_table is not None:
        pages = a.page_table.shape[1]
        row = a.page_table[sequence, page.clamp(0, pages - 1)].long()
    else:
        pages = 1
        row = sequence if a.cache_batch_idx is None else a.cache_batch_idx.long()[sequence]
    inside = (page >= 0) & (page < pages) & (row >= 0) & (row < a.k_cache.shape[0])
    for held, rows in ((a.k_cache, rows_k), (a.v_cache, rows_v)):
        _bytes(held)[row[inside], :, at[inside]] = _bytes(rows.contiguous())[inside]
    return None if a.rotary_cos is None else _rotated_queries(a, first)


def _rotated_queries(a: Append, first: torch.Tensor) -> torch.Tensor:
    """Q in its own shape, each query rotated at ``first`` + i, or all of a sequence at ``first``."""
    q = a.q
    sequence, place, _ = _owners(q, a.cu_seqlens_q)
    position = first.long()[sequence] + (0 if a.one_position else place)
    rows = q[0].transpose(0, 1) if a.cu_seqlens_q is not None else q.transpose(1, 2).flatten(0, 1)
    rotated = _rotated(rows, a, position).view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    return q.new_empty_strided(q.shape, strides_like(q.shape, q.stride(), q.shape[3])).copy_(rotated)


def _owners(tensor: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The sequence of each token, its place in it, and of packed tokens whether a sequence owns it."""
    if cu_seqlens is not None:
        return owners(cu_seqlens, tensor.shape[2])
    batch, length = tensor.shape[0], max(1, tensor.shape[2])
    token = torch.arange(batch * tensor.shape[2], device=tensor.device)
    return token // length, token % length, None


def _rotated(rows: torch.Tensor, a: Append, position: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, heads, head_dim], each rotated by the angle of its position [tokens]."""
    assert a.rotary_cos is not None
    assert a.rotary_sin is not None
    half = a.rotary_cos.shape[1]
    position = position.clamp(0, a.rotary_cos.shape[0] - 1)  # of tokens that belong to no sequence
    cos, sin = (wide(one[position]).unsqueeze(1) for one in (a.rotary_cos, a.rotary_sin))
    turned, rest = wide(rows).tensor_split([2 * half], -1)
    if a.rotary_interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2)
    else:
        x, y = turned[..., :half], turned[..., half:]
        turned = torch.cat((x * cos - y * sin, x * sin + y * cos), -1)
    return torch.cat((turned, rest), -1).to(rows.dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as bytes, which PyTorch can index; another as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
