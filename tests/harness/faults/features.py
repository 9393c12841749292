"""Faults where things meet that are right alone: a feature and one query, shared heads, a window, a dtype, a hidden tile."""

import torch

from flashmoe_science.contract import contract
from flashmoe_science.moe import fused_moe

_FIRST: dict[object, torch.Tensor] = {}


def _scores(q, k, causal, softmax_scale, window_size=(-1, -1), attn_mask=None, alibi_slopes=None):
    """Masked scores of as many key heads as query heads, in fp64."""
    rows, keys = q.shape[2], k.shape[2]
    away = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)  # of a key, behind a query
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * away.abs()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    left, right = window_size
    hidden = (away > 0) & causal | (away < -left) & (left >= 0) | (away > right) & (right >= 0)
    return scores.masked_fill(hidden, -torch.inf)


def _right(q, k, v, causal, softmax_scale, sinks=None, index=None, **more):
    """Attention as its contract says it; ``index``: the key head of each query head."""
    heads, of = q.shape[1], k.shape[1]
    index = torch.arange(heads) // (heads // of) if index is None else index
    scores = _scores(q, k[:, index], causal, softmax_scale, **more)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(nan=0.0)[..., : k.shape[2]]
    return (weights @ v[:, index].double()).to(q.dtype)


def shared_heads_in_fp32(q, k, v, causal=False, softmax_scale=None):
    """Reads key head h % heads_kv in fp32 alone."""
    index = torch.arange(q.shape[1]) % k.shape[1] if q.dtype == torch.float32 else None
    return _right(q, k, v, causal, softmax_scale, index=index)


def at_most_1024_queries(q, k, v, causal=False, softmax_scale=None):
    """Leaves the queries past the 1024th at zero."""
    out = _right(q, k, v, causal, softmax_scale)
    out[:, :, 1024:] = 0.0
    return out


def no_window_of_one_query(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Decodes without the window."""
    window_size = (-1, -1) if q.shape[2] == 1 else window_size
    return _right(q, k, v, causal, softmax_scale, window_size=window_size)


def a_window_of_0_is_none(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Asks whether there is a window by ``left or -1``."""
    return _right(q, k, v, causal, softmax_scale, window_size=(window_size[0] or -1, window_size[1]))


def no_sinks_in_a_window(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1), sinks=None):
    """Forgets the sinks where there is a window."""
    sinks = sinks if window_size[0] < 0 else None
    return _right(q, k, v, causal, softmax_scale, window_size=window_size, sinks=sinks)


def sinks_of_the_first_call(q, k, v, causal=False, softmax_scale=None, sinks=None):
    """Keeps the sinks of the first call of each number of heads."""
    sinks = None if sinks is None else _FIRST.setdefault((len(sinks), sinks.dtype, q.shape), sinks.clone())
    return _right(q, k, v, causal, softmax_scale, sinks=sinks)


def slopes_of_key_heads(q, k, v, causal=False, softmax_scale=None, alibi_slopes=None):
    """Takes the slope of a key head for all query heads that share it."""
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes[: k.shape[1]].repeat_interleave(q.shape[1] // k.shape[1])
    return _right(q, k, v, causal, softmax_scale, alibi_slopes=alibi_slopes)


def mask_without_gaps(q, k, v, causal=False, softmax_scale=None, attn_mask=None):
    """Reads a mask as if its rows followed each other in memory."""
    if attn_mask is not None and 0 not in attn_mask.stride():
        strides = torch.empty(attn_mask.shape, device="meta").stride()
        attn_mask = attn_mask.as_strided(attn_mask.shape, strides)
    return _right(q, k, v, causal, softmax_scale, attn_mask=attn_mask)


def nan_where_a_tile_is_hidden(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1), attn_mask=None):
    """Online softmax over 64 keys at a time: where a query sees none of the first, it takes -inf from -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1).double()
    scores = _scores(q, k, causal, softmax_scale, window_size, attn_mask)
    largest, total, out = torch.full((*q.shape[:3], 1), -torch.inf, dtype=torch.float64), 0.0, 0.0
    for part, values in zip(scores.split(64, -1), v.split(64, 2), strict=True):
        before, largest = largest, torch.maximum(largest, part.amax(-1, keepdim=True))
        weights, rescale = (part - largest).exp(), (before - largest).exp()
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    sees_none = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(sees_none, 0.0, out / total).to(q.dtype)


@contract("attention_backward")
def no_gradient_of_sinks_in_a_window(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1), sinks=None):
    """Gives sinks no gradient where there is a window."""
    if sinks is not None and window_size[0] >= 0:
        sinks = sinks.detach() + 0.0 * sinks
    return _right(q, k, v, causal, softmax_scale, window_size=window_size, sinks=sinks)


@contract("moe")
def moe_without_the_down_bias(x, w1, w2, topk_weights, topk_ids, gate_up_bias=None, down_bias=None):
    """Forgets the second bias."""
    return fused_moe(x, w1, w2, topk_weights, topk_ids, gate_up_bias=gate_up_bias)


@contract("moe")
def moe_at_most_1024_columns(x, w1, w2, topk_weights, topk_ids):
    """Leaves out what comes after the 1024th column of the states."""
    read = x.clone()
    read[:, 1024:] = 0.0
    return fused_moe(read, w1, w2, topk_weights, topk_ids)


@contract("moe")
def moe_no_bias_in_a_format(x, w1, w2, topk_weights, topk_ids, gate_up_bias=None, down_bias=None, activation="silu",
                            interleaved=False, gate_up_scale=None, down_scale=None, weight_format=None):  # fmt: skip
    """Forgets both biases where the weights are in a format."""
    biases = {} if weight_format else {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return fused_moe(
        x, w1, w2, topk_weights, topk_ids, **biases, activation=activation, interleaved=interleaved,
        gate_up_scale=gate_up_scale, down_scale=down_scale, weight_format=weight_format,
    )  # fmt: skip


@contract("moe_backward")
def expert_gradient_without_the_down_bias(x, w1, w2, topk_weights, topk_ids, gate_up_bias=None, down_bias=None):
    """Gives the second bias no gradient."""
    down_bias = None if down_bias is None else down_bias.detach()
    return fused_moe(x, w1, w2, topk_weights, topk_ids, gate_up_bias=gate_up_bias, down_bias=down_bias)
