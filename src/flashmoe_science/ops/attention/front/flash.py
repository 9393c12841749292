"""FlashAttention's arguments in this package's terms: windows, lengths, tables, and what is not supported."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch

from flashmoe_science.ops.attention.call.checks import check_table
from flashmoe_science.ops.attention.call.lengths import Lengths
from flashmoe_science.ops.attention.call.packed import chunk_mask
from flashmoe_science.ops.attention.call.tensors import E4M3, ArgNames, Options, Tensors, max_keys, sequences
from flashmoe_science.ops.attention.front.lengths import refuse_lengths
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.calls import autocast
from flashmoe_science.ops.checks import check_count, check_flag, checked_tensor
from flashmoe_science.printable import shown

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)
_NAMES = {
    "leftpad": "cache_leftpad",
    "sinks": "s_aux",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "bias": "attention_chunk",
}
FLASH_NAMES = ArgNames(**_NAMES)
CACHE_NAMES = ArgNames(k="k_cache", v="v_cache", **_NAMES)
BLOCK_NAMES = ArgNames(k="k_cache", v="v_cache", page_table="block_table", **_NAMES)
VARLEN_NAMES = ArgNames(cache_seqlens="seqused_k", page_table="block_table", **_NAMES)
USED_NAMES = ArgNames(cu_seqlens_k="cu_seqlens_q", cache_seqlens="seqused_q")  # of queries that take no part


def window_of(window_size: object, causal: bool) -> Window:
    """(left, right), None for no limit, as right always is under a causal mask. ``window_size``: two integers, or a CPU tensor
    of two; below 0 or None for no limit. Raises TypeError: something else."""
    if type(window_size) is tuple and window_size == (-1, -1):
        return NO_WINDOW
    sides: list[int | None] = []
    on_gpu = isinstance(window_size, torch.Tensor) and window_size.device.type != "cpu"
    if isinstance(window_size, Sequence) or (isinstance(window_size, torch.Tensor) and window_size.dim() == 1 and not on_gpu):
        for size in window_size:
            if size is None:
                sides.append(None)
            elif not isinstance(size, bool | float | str):
                try:
                    sides.append(operator.index(size))
                except (TypeError, RuntimeError):
                    break
    if len(sides) != 2 or len(window_size) != 2:  # type: ignore[arg-type]  # of sides it has a length
        given = f"a tensor on {window_size.device}" if on_gpu else shown(window_size)  # type: ignore[attr-defined]
        raise TypeError(f"window_size is {given}; it must be two integers, (left, right)")
    left, right = (None if size is None or size < 0 else size for size in sides)
    return left, None if causal else right


def mask_of(causal: object) -> Mask:
    """The mask of a ``causal`` flag, aligned bottom-right. Raises TypeError unless it is True or False."""
    check_flag(causal, "causal")
    return "causal" if causal else "full"


def checked_cap(softcap: object) -> float:
    """``softcap`` as a float. Raises TypeError: not a number. Raises ValueError: below 0 or not finite."""
    if type(softcap) is not float:
        if isinstance(softcap, bool) or not isinstance(softcap, int | float):
            raise TypeError(f"softcap is {shown(softcap)}; it must be a real number, 0.0 for none")
        softcap = float(softcap)
    if not 0.0 <= softcap < math.inf:  # in comparisons, which torch.compile can trace
        raise ValueError(f"softcap is {softcap}; it must be finite and at least 0.0")
    return softcap


def concat_qv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k); if ``qv`` is given, (q with qv, k with v), concatenated: q k^T + qv v^T is one product of wider heads.

    Args:
        qv: in the shape of q with the width of v, or None. k and v are then copied into one tensor.

    Raises:
        TypeError, ValueError: another shape, dtype or device.
        NotImplementedError: e4m3 keys, which have a scale each.
    """
    if qv is None:
        return q, k
    qv = checked_tensor("qv", qv)
    shape = (*q.shape[:-1], v.shape[-1])
    if qv.shape != shape:
        raise ValueError(f"qv has shape {tuple(qv.shape)}; it must have q's, with the width of v: {shape}")
    if k.dtype != v.dtype:
        raise TypeError(f"v has dtype {v.dtype} and k has {k.dtype}; they must be the same")
    if k.dtype == E4M3:
        raise NotImplementedError(f"qv is given and k has dtype {E4M3}; it is served for other dtypes")
    if qv.dtype != q.dtype or qv.device != q.device:
        raise TypeError(f"qv is {qv.dtype} on {qv.device}; it must be as q, {q.dtype} on {q.device}")
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def refuse_other_order(seqused_q: object) -> None:
    """Raise TypeError for FlashAttention-2's order of arguments, in which the eighth is a number."""
    if isinstance(seqused_q, float | int):
        order = f"seqused_q is {seqused_q}, as dropout_p stands in FlashAttention-2's order"
        raise TypeError(f"{order}; from the eighth argument on they must be keywords")


def max_seqlen(value: object, name: str, total: int) -> int:
    """A ``max_seqlen`` as an integer. One on a GPU, or traced, is not read: ``total`` stands for it. Raises TypeError,
    ValueError: not an integer of at least 0."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item() if value.device.type == "cpu" and not torch.compiler.is_compiling() else total
    check_count(value, name, 0)
    return min(cast("int", value), total)


def lengths_of(cache_seqlens: object, batch: int, name: str, q: torch.Tensor) -> torch.Tensor | None:
    """``cache_seqlens`` as int32 [batch]; an integer holds for every sequence. Raises TypeError, ValueError: neither an integer
    of at least 0 nor such a tensor."""
    if isinstance(cache_seqlens, torch.Tensor) or cache_seqlens is None:
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int | torch.SymInt):
        raise TypeError(f"{name} is {shown(cache_seqlens)}; it must be an integer, a torch.Tensor or None")
    check_count(cache_seqlens, name, 0)
    if cache_seqlens >= 2**31:
        raise ValueError(f"{name} is {cache_seqlens}; it must be below 2**31")
    return torch.full((batch,), cast("int", cache_seqlens), dtype=torch.int32, device=q.device)


def slopes_of(alibi_slopes: object, batch: int) -> torch.Tensor | None:
    """``alibi_slopes`` [heads] or [batch, heads] as [batch, heads]. Raises TypeError unless it is a tensor."""
    if alibi_slopes is None:
        return None
    if not isinstance(alibi_slopes, torch.Tensor):
        raise TypeError(f"alibi_slopes is a {type(alibi_slopes).__name__}; it must be a torch.Tensor or None")
    return alibi_slopes.expand(batch, -1) if alibi_slopes.dim() == 1 else alibi_slopes


def one_table(page_table: torch.Tensor | None, block_table: torch.Tensor | None) -> torch.Tensor | None:
    """The table of pages, under FlashAttention-3's name or -2's. Raises ValueError where both are given."""
    if page_table is not None and block_table is not None:
        raise ValueError("page_table and block_table are given; they are two names of one argument")
    return block_table if page_table is None else page_table


def rows_of_table(page_table: torch.Tensor, cache_batch_idx: torch.Tensor, batch: int) -> torch.Tensor:
    """The rows of the table that ``cache_batch_idx`` names, as FlashAttention-3 takes both. Raises as ``check_table``."""
    check_table(cache_batch_idx, "cache_batch_idx", (batch,), page_table)
    refuse_lengths(Lengths(cache_batch_idx=cache_batch_idx, caches=page_table.shape[0]))
    return page_table.index_select(0, cache_batch_idx)


def dequantised_query(
    q: torch.Tensor, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q in bf16, the scale of K) for an e4m3 query; its scale [batch, heads_kv] moves to K, which gives the same scores.
    Raises ValueError: a scale of a query that is not e4m3."""
    if not isinstance(q, torch.Tensor) or q.dtype != E4M3:
        if q_descale is not None:
            raise ValueError(f"q_descale is given and q has dtype {getattr(q, 'dtype', None)}; it is for {E4M3}")
        return q, k_descale
    if q_descale is not None:
        k_descale = q_descale if k_descale is None else q_descale * k_descale
    return q.to(torch.bfloat16), k_descale


def autocast_beside(
    k_cache: torch.Tensor, v_cache: torch.Tensor, q: torch.Tensor, k: Any, v: Any, qv: Any
) -> tuple[Any, ...] | None:
    """(q, k, v, qv) under torch.autocast: queries cast as PyTorch casts them, new keys and values to the caches' dtypes. None
    if nothing, caches included, is to be cast. Caches grow in their own dtype and are cast when read."""
    caches = [one for one in (k_cache, v_cache) if one.dtype != E4M3]
    if autocast((q, qv, k, v, *caches)) is None:
        return None
    k, v = (
        new.to(held.dtype) if isinstance(new, torch.Tensor) and held.dtype != E4M3 else new
        for new, held in ((k, k_cache), (v, v_cache))
    )
    q, qv = autocast((q, qv)) or (q, qv)
    return q, k, v, qv


def with_chunks(tensors: Tensors, options: Options, attention_chunk: object) -> Tensors:
    """The tensors with ``attention_chunk`` as a boolean bias; as they are for 0. Raises TypeError, ValueError: not an integer
    of at least 0, or alibi_slopes are given too."""
    if attention_chunk == 0 and type(attention_chunk) is int:
        return tensors
    check_count(attention_chunk, "attention_chunk", 0)
    assert isinstance(attention_chunk, int)
    if tensors.alibi_slopes is not None:
        raise ValueError(f"attention_chunk is {attention_chunk} and alibi_slopes are given; only one of them may be")
    q, batch, rows, columns = tensors.q, sequences(tensors), tensors.q.shape[2], max_keys(tensors, options)
    of_q: torch.Tensor | int = rows
    of_k: torch.Tensor | int = columns
    if tensors.cu_seqlens_q is not None:
        of_q, rows = tensors.cu_seqlens_q[1:] - tensors.cu_seqlens_q[:-1], options.max_seqlen_q
    if tensors.cu_seqlens_k is not None:
        of_k = tensors.cu_seqlens_k[1:] - tensors.cu_seqlens_k[:-1]
    if tensors.cache_seqlens is not None:
        of_k = tensors.cache_seqlens
    mask = chunk_mask(attention_chunk, rows, columns, of_q, of_k, tensors.leftpad, q.device)
    return tensors._replace(bias=mask.expand(batch, q.shape[1], rows, columns))


def whole_cache(k_cache: torch.Tensor, page_table: torch.Tensor | None, batch: int, k: torch.Tensor | None) -> torch.Tensor:
    """int32 [batch], the capacity of each sequence's cache. Raises ValueError if there are new keys."""
    if k is not None:
        raise ValueError("k and v are given without cache_seqlens, which must say where they are appended")
    capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    return torch.full((batch,), capacity, dtype=torch.int32, device=k_cache.device)


def queries_of(max_seqlen_q: object, q: torch.Tensor, packed: bool) -> int:
    """The most packed queries of a sequence, 0 if not packed. Raises TypeError, ValueError: None, or not an integer of at least
    0."""
    if not packed:
        return 0
    if max_seqlen_q is None:
        raise ValueError("cu_seqlens_q is given without max_seqlen_q, which must say how long the longest sequence is")
    return max_seqlen(max_seqlen_q, "max_seqlen_q", q.shape[0])


def new_keys(
    k: torch.Tensor | None, v: torch.Tensor | None, packed: bool, rotary_cos: torch.Tensor | None, rotary_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Views of k and v to append, heads before tokens; None if neither they nor rotary tables are given. Raises TypeError,
    ValueError: k without v, rotary tables without both, other dimensions."""
    if k is v is rotary_cos is None:
        return None
    check_flag(rotary_interleaved, "rotary_interleaved")
    if k is None or v is None:
        missing = "k" if k is None else "v"
        given = "rotary_cos is" if k is None and v is None else f"{'v' if k is None else 'k'} is"
        raise ValueError(
            f"{missing} is None and {given} given; new keys and values go together, and rotary tables go with them"
        )
    dimensions = ("tokens, heads, head_dim", 3) if packed else ("batch, tokens, heads, head_dim", 4)
    check_dimensions((("k", k), ("v", v)), (dimensions, dimensions))
    return (packed_view(k), packed_view(v)) if packed else (k.transpose(1, 2), v.transpose(1, 2))


def packed_view(tokens: torch.Tensor) -> torch.Tensor:
    """[total, heads, head_dim] as a [1, heads, total, head_dim] view."""
    return tokens.transpose(0, 1).unsqueeze(0)


def check_dimensions(tensors: tuple[tuple[str, object], ...], dimensions: tuple[tuple[str, int], ...]) -> None:
    """Raise TypeError, ValueError unless each (name, tensor) is dense, of as many dimensions as its (words, number) says."""
    checked = [(name, checked_tensor(name, tensor)) for name, tensor in tensors]
    for (name, tensor), (words, number) in zip(checked, dimensions, strict=True):
        if tensor.dim() != number:
            raise ValueError(f"{name} has {tensor.dim()} dimensions; it must have {number} ({words})")
