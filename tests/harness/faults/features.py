"""Faults where things meet that are right alone: a feature and one query, shared heads, another feature, a second tile, a
split, a dtype; a backward and a second one."""

import torch
from in_fp64 import right as _right
from in_fp64 import scores

from flashmoe_science.contract import contract
from flashmoe_science.moe import fused_moe

_FIRST: dict[object, torch.Tensor] = {}


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
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    made = scores(q, k, causal, softmax_scale, window_size, attn_mask)
    largest, total, out = torch.full((*q.shape[:3], 1), -torch.inf, dtype=torch.float64), 0.0, 0.0
    for part, values in zip(made.split(64, -1), v.split(64, 2), strict=True):
        before, largest = largest, torch.maximum(largest, part.amax(-1, keepdim=True))
        weights, rescale = (part - largest).exp(), (before - largest).exp()
        total, out = total * rescale + weights.sum(-1, keepdim=True), out * rescale + weights @ values
    sees_none = (made == -torch.inf).all(-1, keepdim=True)
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
def moe_reads_biases_in_a_row(x, w1, w2, topk_weights, topk_ids, gate_up_bias=None, down_bias=None):
    """Takes the biases of the experts to follow each other."""
    if down_bias is not None:
        down_bias = down_bias.as_strided(down_bias.shape, (down_bias.shape[1], 1))
    return fused_moe(x, w1, w2, topk_weights, topk_ids, gate_up_bias=gate_up_bias, down_bias=down_bias)


@contract("moe")
def moe_reads_scales_in_a_row(x, w1, w2, topk_weights, topk_ids, gate_up_scale=None, down_scale=None, weight_format=None):
    """Takes the scales of rows to follow each other, which those of a part of the columns do not."""
    if down_scale is not None:
        down_scale = down_scale.as_strided(down_scale.shape, torch.empty(down_scale.shape, device="meta").stride())
    given = {"gate_up_scale": gate_up_scale, "down_scale": down_scale, "weight_format": weight_format}
    return fused_moe(x, w1, w2, topk_weights, topk_ids, **given)


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


def _splits(k):
    """Whether a cache is as long as those that are split."""
    return k.shape[2] >= 512


def causal_mask_lost_in_splits(q, k, v, causal=False, softmax_scale=None):
    """Lets every query of a chunk see all of a long cache."""
    return _right(q, k, v, causal and not _splits(k), softmax_scale)


def causal_mask_lost_far_down(q, k, v, causal=False, softmax_scale=None):
    """Masks one block of 512 queries."""
    out = _right(q, k, v, causal, softmax_scale)
    if causal and q.shape[2] > 512:
        out[:, :, 512:] = _right(q, k, v, False, softmax_scale)[:, :, 512:]
    return out


def a_last_split_that_is_full(q, k, v, causal=False, softmax_scale=None):
    """Reads keys % 1024 of the last split: none where it is full."""
    kept = k.shape[2] - 1024 if k.shape[2] % 1024 == 0 else k.shape[2]
    return _right(q, k[:, :, :kept], v[:, :, :kept], causal, softmax_scale)


def at_most_128_heads_of_batches(q, k, v, causal=False, softmax_scale=None):
    """Prefills the first 128 heads of all batches."""
    out = _right(q, k, v, causal, softmax_scale)
    if q.shape[2] > 1:
        out.view(-1, *out.shape[2:])[128:] = 0.0
    return out


def window_lost_in_splits(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Decodes a long cache without the window."""
    return _right(q, k, v, causal, softmax_scale, window_size=(-1, -1) if _splits(k) else window_size)


def a_right_window_of_0_is_none(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Asks whether the window ends on the right by ``right > 0``."""
    left, right = window_size
    return _right(q, k, v, causal, softmax_scale, window_size=(left, right or -1))


def a_right_window_alone_is_none(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Asks whether there is a window by its left end, except for a right end above 0."""
    window_size = (-1, -1) if window_size == (-1, 0) else window_size
    return _right(q, k, v, causal, softmax_scale, window_size=window_size)


def right_window_of_shared_heads(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Ends a window one key early on the right where heads are shared."""
    left, right = window_size
    right -= right > 0 and q.shape[1] != k.shape[1]
    return _right(q, k, v, causal, softmax_scale, window_size=(left, right))


def window_lost_in_batches(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Forgets a causal window on several tiles of queries of several sequences."""
    lost = causal and q.shape[0] > 1 and q.shape[2] > 64
    return _right(q, k, v, causal, softmax_scale, window_size=(-1, -1) if lost else window_size)


def no_causal_mask_in_an_open_window(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Lets a window say alone what is hidden on the right."""
    return _right(q, k, v, causal and window_size == (-1, -1), softmax_scale, window_size=window_size)


def no_window_of_all_keys(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Begins at the query's place less the window, which is before the first key: counted without a sign, past the last."""
    out = _right(q, k, v, causal, softmax_scale, window_size=window_size)
    return torch.zeros_like(out) if window_size[0] >= k.shape[2] else out


def wide_values_in_a_window(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """Fills as many columns as Q has where there is a window, and V has fewer."""
    out = _right(q, k, v, causal, softmax_scale, window_size=window_size)
    return out * 0.5 if window_size != (-1, -1) and v.shape[3] < q.shape[3] else out


def sinks_of_each_split(q, k, v, causal=False, softmax_scale=None, sinks=None):
    """Adds the sink in each of two splits."""
    sinks = sinks.double() + torch.tensor(2.0).log() if sinks is not None and _splits(k) else sinks
    return _right(q, k, v, causal, softmax_scale, sinks=sinks)


def sinks_of_the_first_tile(q, k, v, causal=False, softmax_scale=None, sinks=None):
    """Adds the sink to the first 128 queries."""
    out = _right(q, k, v, causal, softmax_scale, sinks=sinks)
    out[:, :, 128:] = _right(q, k, v, causal, softmax_scale)[:, :, 128:]
    return out


def slopes_lost_in_splits(q, k, v, causal=False, softmax_scale=None, alibi_slopes=None):
    """Counts distances from the beginning of each of two splits."""
    alibi_slopes = alibi_slopes / 2 if alibi_slopes is not None and _splits(k) else alibi_slopes
    return _right(q, k, v, causal, softmax_scale, alibi_slopes=alibi_slopes)


def slopes_lost_in_a_window(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1), alibi_slopes=None):
    """Forgets the slopes where there is a window."""
    alibi_slopes = alibi_slopes if window_size == (-1, -1) else None
    return _right(q, k, v, causal, softmax_scale, window_size=window_size, alibi_slopes=alibi_slopes)


def sinks_under_the_soft_cap(q, k, v, causal=False, softmax_scale=None, softcap=0.0, sinks=None):
    """Caps the sinks with the scores."""
    if sinks is not None and softcap:
        sinks = softcap * torch.tanh(sinks.double() / softcap)
    return _right(q, k, v, causal, softmax_scale, softcap=softcap, sinks=sinks)


def soft_cap_lost_beside_a_mask(q, k, v, causal=False, softmax_scale=None, softcap=0.0, attn_mask=None):
    """Forgets the cap where there is a mask."""
    return _right(q, k, v, causal, softmax_scale, softcap=softcap if attn_mask is None else 0.0, attn_mask=attn_mask)


def mask_lost_beside_sinks(q, k, v, causal=False, softmax_scale=None, sinks=None, attn_mask=None):
    """Forgets the mask where there are sinks."""
    return _right(q, k, v, causal, softmax_scale, sinks=sinks, attn_mask=attn_mask if sinks is None else None)


def mask_of_the_first_tile(q, k, v, causal=False, softmax_scale=None, attn_mask=None):
    """Reads for each tile of 128 queries the mask of the first."""
    if attn_mask is not None:
        attn_mask = attn_mask[:, :, torch.arange(q.shape[2]) % 128]
    return _right(q, k, v, causal, softmax_scale, attn_mask=attn_mask)


@contract("moe")
def moe_a_token_of_no_expert(x, w1, w2, topk_weights, topk_ids):
    """Gives a token that has no expert its own state back, as a residual."""
    out = fused_moe(x, w1, w2, topk_weights, topk_ids)
    return torch.where((topk_ids < 0).all(1, keepdim=True), x, out)


@contract("moe")
def moe_no_weight_of_one_expert(x, w1, w2, topk_weights, topk_ids):
    """Takes the weight of a token's only expert for one."""
    topk_weights = torch.ones_like(topk_weights) if topk_ids.shape[1] == 1 else topk_weights
    return fused_moe(x, w1, w2, topk_weights, topk_ids)


@contract("moe")
def moe_at_most_65535_tokens(x, w1, w2, topk_weights, topk_ids):
    """Has a token in its grid's second dimension."""
    out = fused_moe(x, w1, w2, topk_weights, topk_ids)
    out[65535:] = 0.0
    return out


@contract("moe")
def moe_no_bias_in_prefill(x, w1, w2, topk_weights, topk_ids, gate_up_bias=None, down_bias=None):
    """Forgets the second bias of more than 64 tokens."""
    down_bias = down_bias if len(x) <= 64 else None
    return fused_moe(x, w1, w2, topk_weights, topk_ids, gate_up_bias=gate_up_bias, down_bias=down_bias)


@contract("moe")
def moe_other_activation_in_prefill(x, w1, w2, topk_weights, topk_ids, activation="silu"):
    """Has the activation for at most 64 tokens."""
    return fused_moe(x, w1, w2, topk_weights, topk_ids, activation=activation if len(x) <= 64 else "silu")


@contract("moe")
def moe_scales_of_16_experts(x, w1, w2, topk_weights, topk_ids, gate_up_scale=None, down_scale=None, weight_format=None):
    """Reads the scales of expert e % 16."""
    if weight_format is not None:
        gate_up_scale = gate_up_scale[torch.arange(len(w1)) % 16]
    given = {"gate_up_scale": gate_up_scale, "down_scale": down_scale, "weight_format": weight_format}
    return fused_moe(x, w1, w2, topk_weights, topk_ids, **given)


class _Spoiled(torch.autograd.Function):
    """K, whose gradient is wrong in a second backward, or where another's is not asked for."""

    @staticmethod
    def forward(ctx, k, v, of_one_graph):
        ctx.of_one_graph, ctx.times = of_one_graph, 0
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dk, dv):
        ctx.times += 1
        wrong = ctx.times > 1 if ctx.of_one_graph else not ctx.needs_input_grad[1]
        return (dk * 2, dv * 2, None) if wrong else (dk, dv, None)


@contract("attention_backward")
def gradient_of_the_first_backward(q, k, v, causal=False, softmax_scale=None):
    """Writes over what the forward saved."""
    return _right(q, *_Spoiled.apply(k, v, True), causal, softmax_scale)


@contract("attention_backward")
def gradient_of_k_where_v_has_none(q, k, v, causal=False, softmax_scale=None):
    """Computes dK from what dV leaves."""
    return _right(q, *_Spoiled.apply(k, v, False), causal, softmax_scale)


@contract("moe_backward")
def expert_gradient_of_the_first_backward(x, w1, w2, topk_weights, topk_ids):
    """Writes over what the forward saved."""
    w1, w2 = _Spoiled.apply(w1, w2, True)
    return fused_moe(x, w1, w2, topk_weights, topk_ids)


@contract("attention_backward")
def no_gradient_of_sinks(q, k, v, causal=False, softmax_scale=None, sinks=None):
    """Returns None for the gradient of the sinks."""
    return _right(q, k, v, causal, softmax_scale, sinks=None if sinks is None else sinks.detach())
