"""An extension that was built against another PyTorch: it fails at import, not when it is timed."""

raise ImportError("flash_ext.so: undefined symbol: _ZN2at4_ops9empty_like4callERKNS_6TensorE")


def attention(q, k, v, causal=False, softmax_scale=None):
    return q
