"""The documents' second failure: 384 threads are promised, the bindings launch 128."""

from base import attend


def attention(q, k, v, causal=False, softmax_scale=None):
    return attend(q, k, v, causal, softmax_scale, warps=4)


attention.promises = {"kernel": "base_kernel", "threads": 384}  # type: ignore[attr-defined]
