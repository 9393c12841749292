"""Sets flags of PyTorch's backends and of the process for its own good, and leaves them so."""

import gc

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    torch.backends.cudnn.benchmark = True
    torch.set_flush_denormal(True)
    gc.disable()
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
