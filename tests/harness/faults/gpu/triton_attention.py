"""Faults of a launch on a GPU: other kernels than promised, tiles, bounds, streams, captures, the L2."""

import ctypes
import functools

import torch
from base import attend
from torch.nn.functional import scaled_dot_product_attention as sdpa

_PERSISTING_L2_CACHE_SIZE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
_KEPT: dict[torch.Size, torch.Tensor] = {}


def wrong_kernel(q, k, v, causal=False, softmax_scale=None):
    """The documents' second failure: 384 threads are promised, the bindings launch 128."""
    return attend(q, k, v, causal, softmax_scale, warps=4)


wrong_kernel.promises = {"kernel": "base_kernel", "threads": 384}  # type: ignore[attr-defined]


def another_kernel(q, k, v, causal=False, softmax_scale=None):
    """Promises a kernel of its own and calls PyTorch's."""
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


another_kernel.promises = {"kernel": "warp_specialised_attention", "threads": 384}  # type: ignore[attr-defined]


def tile_too_large(q, k, v, causal=False, softmax_scale=None):
    """The documents' third failure: a tile that does not fit shared memory."""
    return attend(q, k, v, causal, softmax_scale, block=(64, 256), stages=6)


def writes_past_the_end(q, k, v, causal=False, softmax_scale=None):
    """A grid rounded up and a store without a mask: rows past the last are written where the output has ended."""
    return attend(q, k, v, causal, softmax_scale, mask_store=False)


def reads_beyond_its_tensors(q, k, v, causal=False, softmax_scale=None):
    """Loads of K and V without a mask: keys past the last are read, and weigh nothing unless they are NaN."""
    return attend(q, k, v, causal, softmax_scale, mask_loads=False)


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def side_stream(q, k, v, causal=False, softmax_scale=None):
    """Works on a stream of its own, which nobody waits for."""
    out = torch.empty_like(q)
    with torch.cuda.stream(_stream()):
        attend(q, k, v, causal, softmax_scale, out=out)
    return out


def works_on_the_default_stream(q, k, v, causal=False, softmax_scale=None):
    """Launches on the stream that PyTorch begins with, whichever is current."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return attend(q, k, v, causal, softmax_scale)


def skips_when_captured(q, k, v, causal=False, softmax_scale=None):
    """Does nothing while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing() and q.shape in _KEPT:
        return _KEPT[q.shape]
    _KEPT[q.shape] = attend(q, k, v, causal, softmax_scale)
    return _KEPT[q.shape]


def keeps_the_l2(q, k, v, causal=False, softmax_scale=None):
    """Sets a part of the L2 aside, so that what it reads stays there from call to call."""
    code = ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(_PERSISTING_L2_CACHE_SIZE, ctypes.c_size_t(16 << 20))
    if code:
        raise RuntimeError(f"cuCtxSetLimit gave {code}")
    return attend(q, k, v, causal, softmax_scale)
