"""Leaves a mode of PyTorch's behind that sees all that is done with tensors from then on."""

from typing import Any

from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class _Listens(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def attention(q, k, v, causal=False, softmax_scale=None):
    _Listens().__enter__()
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
