"""Attention's inputs as callers have them: the same tensors elsewhere in memory, and values that a trained model has.

Each takes the inputs by name and gives them back changed. Caches with lengths and pages are made as callers have them already.
"""

from __future__ import annotations

import math

import torch

Made = dict[str, torch.Tensor]

_OUTLIER = 2.0**12  # times a key of standard normal numbers: fp16 holds it, and not its products with queries


def as_made(made: Made) -> Made:
    """The tensors as they are."""
    return made


def one_projection(made: Made) -> Made:
    """Q, K and V as views of one tensor [batch, rows, heads and their columns], as one projection gives them; K and V alone
    where Q has other rows than they."""
    names = ["q", "k", "v"] if made["q"].shape[::2] == made["k"].shape[::2] else ["k", "v"]
    if any(made[name].dtype != made["k"].dtype for name in names):
        names = ["k", "v"]
    batch, _, rows, _ = made["k"].shape
    widths = [made[name].shape[1] * made[name].shape[3] for name in names]
    whole = torch.empty((batch, rows, sum(widths)), dtype=made["k"].dtype, device=made["k"].device)
    parts = whole.split(widths, -1)
    views = {name: part.unflatten(-1, made[name].shape[1::2]).transpose(1, 2) for name, part in zip(names, parts, strict=True)}
    return made | {name: view.copy_(made[name]) for name, view in views.items()}


def two_orders(made: Made) -> Made:
    """K with heads before rows in memory and V with rows before heads, whatever Q has."""
    return made | {"k": made["k"].contiguous(), "v": made["v"].transpose(1, 2).contiguous().transpose(1, 2)}


def rows_before_batches(made: Made) -> Made:
    """Q, K and V as [rows, batch, heads, width] in memory."""
    return made | {name: made[name].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name in ("q", "k", "v")}


def beyond_32_bits(made: Made) -> Made:
    """K and V of 16 bits in one memory, with 2^31 elements or more from the first batch, head or row to the last."""
    k, v = made["k"], made["v"]
    far = next((dim for dim in range(3) if k.shape[dim] > 1), None)
    if far is None or k.element_size() != 2 or v.shape[:3] != k.shape[:3]:
        return made
    strides = list(torch.empty((*k.shape[:3], k.shape[3] + v.shape[3]), device="meta").stride())
    strides[far] = 64 * math.ceil(2**25 / (k.shape[far] - 1))  # 2^31 in all, and every row aligned
    elements = 2**31 + 64 * k.shape[far] + 2 * k.numel() + 2 * v.numel()
    try:
        whole = torch.empty(elements, dtype=k.dtype, device=k.device)
    except RuntimeError as error:  # which on a CPU does not say that it is of memory
        raise torch.OutOfMemoryError(str(error)) from error
    views = {"k": whole.as_strided(k.shape, strides), "v": whole.as_strided(v.shape, strides, k.shape[3])}
    return made | {name: view.copy_(made[name]) for name, view in views.items()}


def values_of_keys(made: Made) -> Made:
    """V as the first columns of K, at the same address, as a latent cache has them."""
    k, v = made["k"], made["v"]
    fits = v.dtype == k.dtype and v.shape[:3] == k.shape[:3] and v.shape[3] <= k.shape[3]
    return made | {"v": k[..., : v.shape[3]]} if fits else made


def expanded(made: Made) -> Made:
    """Q and K of the first batch for all, V of the first head for all, of a mask the first row: strides of 0."""
    if "cache_seqlens" in made or "cu_seqlens_q" in made:
        return made
    if "bias" in made and not _has_gradient(made):  # of an expanded one it would be a sum
        made = made | {"bias": made["bias"][:, :, :1].expand_as(made["bias"])}
    q, k, v = (made[name] for name in ("q", "k", "v"))
    return made | {"q": q[:1].expand_as(q), "k": k[:1].expand_as(k), "v": v[:, :1].expand_as(v)}


def at_odd_addresses(made: Made) -> Made:
    """Q, K and V an element past where an allocator begins tensors."""
    return made | {name: _an_element_on(made[name]) for name in ("q", "k", "v")}


def _an_element_on(tensor: torch.Tensor) -> torch.Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = torch.empty(reach + 2, dtype=tensor.dtype, device=tensor.device)
    return whole.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def with_an_outlier(made: Made) -> Made:
    """One key of each head far larger than the others: the scores of half of the queries are one-hot."""
    if made["k"].element_size() > 1:
        made["k"][:, :, made["k"].shape[2] // 3] *= _OUTLIER
    return made


def with_hidden_keys(made: Made) -> Made:
    """A mask or a bias that hides the first three quarters of the keys, whole tiles of them, from each query whose diagonal
    lies behind those keys: under a causal mask an earlier query would be left none."""
    if "bias" in made:
        mask, is_boolean = made["bias"], made["bias"].dtype == torch.bool
        rows, keys = mask.shape[-2:]
        hidden = keys * 3 // 4
        mask[..., max(rows - keys + hidden, 0) :, :hidden] = False if is_boolean else -torch.inf
        if is_boolean:  # the rest of a row may be hidden by chance
            mask.diagonal(keys - rows, -2, -1).fill_(True)
    return made


def _has_gradient(made: Made) -> bool:
    """Whether the bias of a backward's inputs is differentiated: a boolean mask is not."""
    return "dout" in made and made["bias"].is_floating_point()


def reordered_gradient(made: Made) -> Made:
    """The gradient with rows before heads in memory where Q has heads before rows, or the other way round."""
    dout = made["dout"]
    rows_first = made["q"].stride(1) < made["q"].stride(2)
    return made | {"dout": dout.contiguous() if rows_first else dout.transpose(1, 2).contiguous().transpose(1, 2)}


def expanded_gradient(made: Made) -> Made:
    """The gradient of a sum: ones, with strides of 0."""
    return made | {"dout": made["dout"].new_ones(()).expand_as(made["dout"])}
