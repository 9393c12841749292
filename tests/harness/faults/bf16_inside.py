"""Computes in bf16 what was given in fp32."""

from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    return (scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)).float()
