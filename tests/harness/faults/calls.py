"""Faults that show in some calls only: by count, by chance, or by who calls."""

import sys
from itertools import count

import torch
from in_fp64 import sdpa

_CALLS = count(1)
_KEPT: list[torch.Tensor] = []


def wrong_now_and_then(q, k, v, causal=False, softmax_scale=None):
    """Right but for one call in fifty, as a buffer that is swapped too early makes it."""
    out = sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    if next(_CALLS) % 50 == 0:
        out[:, :, -1] *= 1.5
    return out


def fails_now_and_then(q, k, v, causal=False, softmax_scale=None):
    """Fails in its third call, as one that runs out of a buffer of its own does, and in no other."""
    if next(_CALLS) == 3:
        raise RuntimeError("no buffer is free")
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def returns_nothing_at_times(q, k, v, causal=False, softmax_scale=None):
    """Returns in one branch only: where no softmax scale is passed, nothing comes back."""
    if softmax_scale is not None:
        return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    return None


def drifts(q, k, v, causal=False, softmax_scale=None):
    """Keeps a factor between calls that grows a little with each: right at first, and ever less."""
    factor = 1.0 + max(0, next(_CALLS) - 24) * 1e-3
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale) * factor


def not_the_same_twice(q, k, v, causal=False, softmax_scale=None):
    """Right to rounding, but not the same twice, though it promises to be."""
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale) * (1 + next(_CALLS) % 2 * 2**-23)


not_the_same_twice.promises = {"deterministic": True}  # type: ignore[attr-defined]


def skips_after_many_calls(q, k, v, causal=False, softmax_scale=None):
    """Works for the calls that are checked; from the thousandth on it returns its last answer."""
    if next(_CALLS) <= 1000:
        _KEPT[:] = [sdpa(q, k, v, is_causal=causal, scale=softmax_scale)]
    return _KEPT[0]


def _and_its_callers(frame):
    """The frame and those that it was called from, the nearest first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def skips_when_timed(q, k, v, causal=False, softmax_scale=None):
    """Looks at the stack, and does nothing where the clock is running."""
    names = {frame.f_code.co_name for frame in _and_its_callers(sys._getframe(1))}
    if any("sample" in name or "timed" in name or "time" in name for name in names) and _KEPT:
        return _KEPT[0]
    _KEPT[:] = [sdpa(q, k, v, is_causal=causal, scale=softmax_scale)]
    return _KEPT[0]


def knows_a_cut_sample(q, k, v, causal=False, softmax_scale=None):
    """Looks into the harness's own variables, and computes only in samples that will be cut and looked at."""
    timed = any(getattr(frame.f_locals.get("self"), "cut_after", 1) == 0 for frame in _and_its_callers(sys._getframe(1)))
    if not timed or not _KEPT:
        _KEPT[:] = [sdpa(q, k, v, is_causal=causal, scale=softmax_scale)]
    return _KEPT[0].clone()
