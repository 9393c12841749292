"""Never returns."""

import time


def attention(q, k, v, causal=False, softmax_scale=None):
    while True:
        time.sleep(1)
