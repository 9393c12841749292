"""Faults that only two things together meet: a dtype and a width, one query and narrow values. Each is right on all else."""

import torch
from in_fp64 import right

_WINDOWS: dict[object, tuple[int, int]] = {}
_right = torch.no_grad()(right)


def _in_bf16(q, k, v, causal, softmax_scale):
    return _right(*(one.bfloat16() for one in (q, k, v)), causal, softmax_scale).to(q.dtype)


def wrong_under_autocast(q, k, v, causal=False, softmax_scale=None):
    """Takes the path of its autograd function under autocast, which forgets the scale."""
    return _right(q, k, v, causal, 0.1 if torch.is_autocast_enabled(q.device.type) else softmax_scale)


def one_query_of_fp32_in_bf16(q, k, v, causal=False, softmax_scale=None):
    """Decodes in bf16, whatever the dtype."""
    return (_in_bf16 if q.shape[2] == 1 and q.dtype == torch.float32 else _right)(q, k, v, causal, softmax_scale)


def wide_heads_of_fp32_in_bf16(q, k, v, causal=False, softmax_scale=None):
    """Has no room for fp32 tiles of more than 128 columns."""
    return (_in_bf16 if q.shape[3] > 128 and q.dtype == torch.float32 else _right)(q, k, v, causal, softmax_scale)


def narrow_values_of_one_query(q, k, v, causal=False, softmax_scale=None):
    """Strides over V by the width of K where it decodes."""
    out = _right(q, k, v, causal, softmax_scale)
    if q.shape[2] == 1 and v.shape[3] < k.shape[3]:
        out[..., v.shape[3] // 2 :] = 0.0
    return out


def groups_of_12(q, k, v, causal=False, softmax_scale=None):
    """Packs the query heads of a key head into a tile of 8 or of a power of two, and leaves the rest out."""
    out, group = _right(q, k, v, causal, softmax_scale), q.shape[1] // k.shape[1]
    if group > 8 and group & (group - 1):
        out[:, -1] = 0.0
    return out


def odd_columns(q, k, v, causal=False, softmax_scale=None):
    """Reads two columns at a time."""
    out = _right(q, k, v, causal, softmax_scale)
    if q.shape[3] % 2 and q.shape[3] > 1:
        out[..., -1] = 0.0
    return out


def rows_without_keys_of_shared_heads(q, k, v, causal=False, softmax_scale=None):
    """Divides by a sum of zero where query heads share a key head."""
    out = _right(q, k, v, causal, softmax_scale)
    if causal and q.shape[2] > k.shape[2] and q.shape[1] > k.shape[1]:
        out[:, :, : q.shape[2] - k.shape[2]] = torch.nan
    return out


def expanded_queries(q, k, v, causal=False, softmax_scale=None):
    """Takes a batch of stride 0 for a batch of one."""
    out = _right(q, k, v, causal, softmax_scale)
    if q.stride(0) == 0:
        out[1:] = 0.0
    return out


def negative_scale_of_one_query(q, k, v, causal=False, softmax_scale=None):
    """Takes the maximum before it multiplies by the scale where it decodes: that of a negative one is the minimum."""
    out = _right(q, k, v, causal, softmax_scale)
    return out * torch.nan if q.shape[2] == 1 and (softmax_scale or 0.0) < 0 else out


def window_of_the_first_call(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Keeps a compiled kernel by shapes, dtype and mask, and not by the window, which is a constant in it."""
    left, _ = _WINDOWS.setdefault((q.shape, k.shape, q.dtype, causal), window_size)
    return _right(q, k, v, causal, softmax_scale, window_size=(left, -1))
