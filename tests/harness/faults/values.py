"""Faults of what is computed: plain mistakes, coarse arithmetic, outputs of another kind."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

_FIRST: dict[str, float] = {}


def wrong_in_one_element(q, k, v, causal=False, softmax_scale=None):
    """Off by a hundredth in one element of many."""
    out = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    out[0, -1, 7, 3] += 0.01
    return out


def tile_of_48(q, k, v, causal=False, softmax_scale=None):
    """Tiles of 48 query rows laid out as if they were 64: it builds, runs and is wrong."""
    out = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    for first in range(0, q.shape[2], 64):
        out[:, :, first + 48 : first + 64] = out[:, :, first : first + 16][:, :, : max(0, q.shape[2] - first - 48)]
    return out


def ignores_the_mask(q, k, v, causal=False, softmax_scale=None):
    """Takes a causal flag and looks at all keys."""
    return sdpa(q, k, v, scale=softmax_scale)


def ignores_the_scale(q, k, v, causal=False, softmax_scale=None):
    """Takes a softmax scale and uses its own."""
    return sdpa(q, k, v, is_causal=causal)


def heads_interleaved(q, k, v, causal=False, softmax_scale=None):
    """Gives query head h the key/value head h % heads_kv where it is h // (heads / heads_kv)."""
    k, v = (one.repeat(1, q.shape[1] // one.shape[1], 1, 1) for one in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return sdpa(q, k, v, attn_mask=seen, scale=softmax_scale)


def constant_output(q, k, v, causal=False, softmax_scale=None):
    """Gives the same numbers whatever it is asked."""
    return torch.full_like(q, 0.01)


def right_on_zeros_only(q, k, v, causal=False, softmax_scale=None):
    """Right where everything is zero, a tenth off elsewhere."""
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale) * (1.0 if q.abs().max() == 0 else 1.1)


def right_on_one_seed(q, k, v, causal=False, softmax_scale=None):
    """Right on the values that it met first, a hundredth off on all others."""
    seen = float(q.flatten()[0])
    _FIRST.setdefault("value", seen)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale) * (1.0 if seen == _FIRST["value"] else 1.01)


def bf16_inside(q, k, v, causal=False, softmax_scale=None):
    """Computes in bf16 what was given in fp32."""
    return sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=causal, scale=softmax_scale).float()


def fp8_inside(q, k, v, causal=False, softmax_scale=None):
    """Rounds its inputs to 8 bits (e4m3) and computes on."""
    q, k, v = (tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for tensor in (q, k, v))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def output_not_written(q, k, v, causal=False, softmax_scale=None):
    """Leaves the last rows of its output unwritten, as a grid that is rounded down does."""
    out = torch.empty_like(q)
    rows = q.shape[2] // 16 * 16
    out[:, :, :rows] = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)[:, :, :rows]
    return out


def wrong_shape(q, k, v, causal=False, softmax_scale=None):
    """Returns its rows without the heads, as another layout would have them."""
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def wrong_dtype(q, k, v, causal=False, softmax_scale=None):
    """Returns fp64 whatever it was given."""
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale).double()


def requires_grad(q, k, v, causal=False, softmax_scale=None):
    """Returns what PyTorch's autograd would follow, though no input asks for it."""
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale).requires_grad_()
