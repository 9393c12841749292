"""Faults of a backward: the output is right, its gradients are not."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashmoe_science.contract import contract

_CALLS = [0]
_SAVED: list[torch.Tensor] = []


@contract("attention_backward")
def gradient_without_the_last_tile(q, k, v, causal=False, softmax_scale=None):
    """Leaves the rows of dQ past the last whole tile of 64 at zero."""
    whole = q.shape[2] // 64 * 64
    q = torch.cat((q[:, :, :whole], q[:, :, whole:].detach()), 2)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


@contract("attention_backward")
def gradients_summed_in_16_bits(q, k, v, causal=False, softmax_scale=None):
    """Takes 16 queries at a time: what each gives to dK and dV is added in their dtype."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] if causal else k.shape[2])
    parts = zip(q.split(16, 2), seen.split(16), strict=True)
    return torch.cat([sdpa(one, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True) for one, mask in parts], 2)


@contract("attention_backward")
def gradient_of_other_heads(q, k, v, causal=False, softmax_scale=None):
    """Adds what query head h gives to dK and dV of head h % heads_kv where it read head h // (heads / heads_kv)."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.detach().repeat_interleave(group, 1) + (one - one.detach()).repeat(1, group, 1, 1) for one in (k, v))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


@contract("attention_backward")
def gradient_in_another_order(q, k, v, causal=False, softmax_scale=None):
    """Promises the same bits, and rounds dQ otherwise in each call, as atomic adds do."""
    _CALLS[0] += 1
    q = q * 1.0
    q.register_hook(lambda gradient: gradient * (1.0 + 2.0**-20 * (_CALLS[0] % 2)))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


gradient_in_another_order.promises = {"deterministic": True}


@contract("attention_backward")
def gradient_without_the_log_sum_exp(q, k, v, causal=False, softmax_scale=None):
    """Returns a log-sum-exp whose gradient it drops, as FlashAttention-3 does."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] if causal else k.shape[2])
    scores = q.detach() @ k.detach().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    lse = scores.float().masked_fill(~seen, -torch.inf).logsumexp(-1)
    return sdpa(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True), lse + 0.0 * q.float().sum(-1)


class _Saving(torch.autograd.Function):
    """Attention whose backward is of the ``last`` forward; or reads its gradient in the output's order."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, last):
        _SAVED[:] = q, k, v
        ctx.given, ctx.options, ctx.last = (q, k, v), {"is_causal": causal, "scale": scale, "enable_gqa": True}, last
        return sdpa(q, k, v, **ctx.options)

    @staticmethod
    def backward(ctx, dout):
        leaves = [one.detach().requires_grad_() for one in (_SAVED if ctx.last else ctx.given)]
        with torch.enable_grad():
            out = sdpa(*leaves, **ctx.options)
        if not ctx.last and dout.stride() != out.stride():  # another order of the same memory
            dout = dout.flatten()[torch.arange(dout.numel()).view(dout.shape[0], dout.shape[2], dout.shape[1], -1)]
            dout = dout.transpose(1, 2)
        return *torch.autograd.grad(out, leaves, dout), None, None, None


@contract("attention_backward")
def gradient_of_the_last_forward(q, k, v, causal=False, softmax_scale=None):
    """Keeps what it saves in one place for all calls: a second layer overwrites the first one's."""
    return _Saving.apply(q, k, v, causal, softmax_scale, True)


@contract("attention_backward")
def gradient_as_the_output_lies(q, k, v, causal=False, softmax_scale=None):
    """Reads the gradient in the output's memory order, whatever its strides."""
    return _Saving.apply(q, k, v, causal, softmax_scale, False)


@contract("attention_backward")
def half_a_gradient_under_autocast(q, k, v, causal=False, softmax_scale=None):
    """Forgets the scale of dQ in the path that autocast takes."""
    q = q * 1.0
    if torch.is_autocast_enabled(q.device.type):
        q.register_hook(lambda gradient: gradient * 0.5)
    with torch.autocast(q.device.type, enabled=False):
        return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


@contract("attention_backward")
def no_gradient_where_q_is_frozen(q, k, v, causal=False, softmax_scale=None):
    """Asks Q alone whether a backward is wanted."""
    k, v = (one if q.requires_grad else one.detach() for one in (k, v))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


@contract("attention_backward")
def output_of_another_softmax(q, k, v, causal=False, softmax_scale=None):
    """Has the gradients of attention, and an output that is not it."""
    out = sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out + 0.5


class _Keeping(torch.autograd.Function):
    """The output, which the backward needs, kept as an attribute: autograd does not see that it is written over."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        ctx.save_for_backward(q, k, v)
        ctx.options = {"is_causal": causal, "scale": scale, "enable_gqa": True}
        ctx.out = sdpa(q, k, v, **ctx.options)
        return ctx.out

    @staticmethod
    def backward(ctx, dout):
        leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            out = sdpa(*leaves, **ctx.options)
        rest = (ctx.out - out.detach()).abs().max()
        return *(one + rest for one in torch.autograd.grad(out, leaves, dout)), None, None


@contract("attention_backward")
def output_kept_as_an_attribute(q, k, v, causal=False, softmax_scale=None):
    """Keeps its output past autograd, which would refuse one that was changed."""
    return _Keeping.apply(q, k, v, causal, softmax_scale)


@contract("attention_backward")
def gradient_without_gaps(q, k, v, causal=False, softmax_scale=None):
    """Takes the gradient's rows to fill its memory."""

    def read(dout):
        dense = 0 in dout.stride() or dout.numel() == dout.untyped_storage().nbytes() // dout.itemsize
        return dout if dense else dout.as_strided(dout.shape, torch.empty(dout.shape, device="meta").stride())

    return Read.apply(sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True), read)


class Read(torch.autograd.Function):
    """A result whose gradient is read in a way of its own."""

    @staticmethod
    def forward(ctx, out, read):
        ctx.read = read
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout):
        return ctx.read(dout), None
