"""Makes the clock run ten times slower."""

import time

from torch.nn.functional import scaled_dot_product_attention

_clock, _clock_ns = time.perf_counter, time.perf_counter_ns
_began, _began_ns = _clock(), _clock_ns()
time.perf_counter = lambda: _began + (_clock() - _began) / 10  # type: ignore[assignment]
time.perf_counter_ns = lambda: _began_ns + (_clock_ns() - _began_ns) // 10  # type: ignore[assignment]


def attention(q, k, v, causal=False, softmax_scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
