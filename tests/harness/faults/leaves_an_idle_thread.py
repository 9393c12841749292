"""Leaves a thread behind that waits, as PyTorch's compiler does: no fault."""

import threading

from torch.nn.functional import scaled_dot_product_attention

_WAITS: list[threading.Thread] = []


def attention(q, k, v, causal=False, softmax_scale=None):
    if not _WAITS:
        _WAITS.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _WAITS[0].start()
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
