"""Faults of whose memory is written, given back or kept."""

from itertools import count

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

_KEPT: dict[object, torch.Tensor] = {}
_HELD: list[torch.Tensor] = []
_CALLS = count()


def writes_past_the_end(q, k, v, causal=False, softmax_scale=None):
    """Writes past the end of a tensor that it was given, where there is memory behind it, as a tile without a mask does."""
    end = v.storage_offset() + v.numel()
    if v.untyped_storage().nbytes() >= (end + 8) * v.itemsize:  # Python cannot write where there is none
        torch.as_strided(v, (8,), (1,), end).fill_(1.0)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def writes_past_its_output(q, k, v, causal=False, softmax_scale=None):
    """Writes past the end of the output that it allocated, where there is memory behind it, as a grid rounded up does."""
    out = torch.empty_like(q)
    out.copy_(sdpa(q, k, v, is_causal=causal, scale=softmax_scale))
    end = out.storage_offset() + out.numel()
    if out.untyped_storage().nbytes() >= (end + 8) * out.itemsize:  # Python cannot write where there is none
        torch.as_strided(out, (8,), (1,), end).fill_(1.0)
    return out


def changes_its_input(q, k, v, causal=False, softmax_scale=None):
    """Scales V where it lies."""
    out = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    v.mul_(1.0001)
    return out


def returns_its_input(q, k, v, causal=False, softmax_scale=None):
    """Gives Q back, having written the answer over it."""
    return q.copy_(sdpa(q, k, v, is_causal=causal, scale=softmax_scale))


def cached_by_pointer(q, k, v, causal=False, softmax_scale=None):
    """Keeps its answers by the address of the inputs."""
    if q.data_ptr() not in _KEPT:
        _KEPT[q.data_ptr()] = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    return _KEPT[q.data_ptr()]


def cached_by_shape(q, k, v, causal=False, softmax_scale=None):
    """Keeps its answers by the shape of the inputs."""
    if q.shape not in _KEPT:
        _KEPT[q.shape] = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    return _KEPT[q.shape].clone()


def sums_its_input(q, k, v, causal=False, softmax_scale=None):
    """Keeps its answers by a checksum of a few elements of its inputs: right on new tensors, not on one changed element."""
    few = [float(one.flatten()[:: max(1, one.numel() // 4)].double().sum()) for one in (q, k, v)]
    key = (q.shape, k.shape, causal, softmax_scale, *few)
    if key not in _KEPT:
        _KEPT[key] = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    return _KEPT[key].clone()


def remembers_contents(q, k, v, causal=False, softmax_scale=None):
    """Looks at its inputs just enough to know whether it has seen them, and then gives the answer that it kept."""
    key = (q.data_ptr(), *(float(one.sum()) for one in (q, k, v)), softmax_scale)
    if key not in _KEPT:
        _KEPT[key] = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    return _KEPT[key].clone()  # a caller may keep it


def reuses_its_output(q, k, v, causal=False, softmax_scale=None):
    """Returns the same memory at every call, so that a caller's earlier answer changes."""
    if q.shape not in _KEPT:
        _KEPT[q.shape] = torch.empty_like(q)
    return _KEPT[q.shape].copy_(sdpa(q, k, v, is_causal=causal, scale=softmax_scale))


def rings_of_outputs(q, k, v, causal=False, softmax_scale=None):
    """Returns the memory of eight outputs in turn, so that the ninth call changes the first answer."""
    if not _HELD or _HELD[0].shape != q.shape:
        _HELD[:] = [torch.empty(q.shape, dtype=q.dtype) for _ in range(8)]
    return _HELD[next(_CALLS) % 8].copy_(sdpa(q, k, v, is_causal=causal, scale=softmax_scale))


def changes_earlier_answers(q, k, v, causal=False, softmax_scale=None):
    """Uses the output of the call before as scratch memory, which its caller may still hold."""
    out = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    for before in _HELD:
        before.zero_()
    _HELD[:] = [out]
    return out
