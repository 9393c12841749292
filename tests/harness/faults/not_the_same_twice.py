"""Right to rounding, but not the same twice, though it promises to be."""

from itertools import count

from torch.nn.functional import scaled_dot_product_attention

_CALLS = count()


def attention(q, k, v, causal=False, softmax_scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale) * (1 + next(_CALLS) % 2 * 2**-23)


attention.promises = {"deterministic": True}  # type: ignore[attr-defined]
