"""Faults, and two harmless habits, of what a call does to its process: threads, settings, modes, pipes, its end."""

import contextlib
import gc
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from in_fp64 import sdpa
from torch.overrides import TorchFunctionMode

_THREADS: list[threading.Thread] = []


def exits(q, k, v, causal=False, softmax_scale=None):
    """Ends the process with success."""
    os._exit(0)


def ends_the_interpreter(q, k, v, causal=False, softmax_scale=None):
    """Calls sys.exit with success where it was asked to compute."""
    sys.exit(0)


def hangs(q, k, v, causal=False, softmax_scale=None):
    """Never returns."""
    while True:
        time.sleep(1)


def floods_its_output(q, k, v, causal=False, softmax_scale=None):
    """Prints twice what a pipe holds at every call: no fault."""
    print("x" * (1 << 17), flush=True)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def forges_an_answer(q, k, v, causal=False, softmax_scale=None):
    """Writes an answer of its own into the pipe that the harness listens to."""
    for word in sys.argv[1:]:
        if word.isdigit():
            with contextlib.suppress(OSError):  # the end that only reads
                os.write(int(word), json.dumps({"token": "0", "said": {"ns": 1.0}}).encode() + b"\n")
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def _leave(target: Callable[[], object], count: int = 1) -> None:
    """Leave threads running, begun at the first call."""
    while len(_THREADS) < count:
        _THREADS.append(threading.Thread(target=target, daemon=True))
        _THREADS[-1].start()


def _burn() -> None:
    block = bytes(1 << 20)
    while True:
        zlib.crc32(block)  # without the interpreter's lock


def burns_the_other_cores(q, k, v, causal=False, softmax_scale=None):
    """Leaves threads running, which take the processors from its rival: two, as other processes may want them too."""
    _leave(_burn, count=2)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def leaves_an_idle_thread(q, k, v, causal=False, softmax_scale=None):
    """Leaves a thread behind that waits, as PyTorch's compiler does: no fault."""
    _leave(threading.Event().wait)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def works_on_a_thread(q, k, v, causal=False, softmax_scale=None):
    """Returns at once and lets a thread fill in the answer."""
    out = torch.zeros_like(q)

    def work() -> None:
        time.sleep(0.002)
        out.copy_(sdpa(q, k, v, is_causal=causal, scale=softmax_scale))

    threading.Thread(target=work).start()
    return out


def changes_the_settings(q, k, v, causal=False, softmax_scale=None):
    """Leaves PyTorch with other settings than it found: one thread, coarse products, another autocast."""
    torch.set_num_threads(1 + torch.get_num_threads() % 2)
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_dtype("cpu", torch.float16)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


def sets_backend_flags(q, k, v, causal=False, softmax_scale=None):
    """Sets flags of PyTorch's backends and of the process for its own good, and leaves them so."""
    torch.backends.cudnn.benchmark = True
    torch.set_flush_denormal(True)
    gc.disable()
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


class _Listens(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def leaves_a_mode(q, k, v, causal=False, softmax_scale=None):
    """Leaves a mode of PyTorch's behind that sees all that is done with tensors from then on."""
    _Listens().__enter__()
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


class _Lazy(torch.Tensor):
    work: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.work() if isinstance(value, _Lazy) and "work" in value.__dict__ else value

        return func(*(plain(value) for value in args), **(kwargs or {}))


def lazy_output(q, k, v, causal=False, softmax_scale=None):
    """Returns a tensor that does its work when somebody looks."""
    out = torch.zeros_like(q).as_subclass(_Lazy)
    out.work = lambda: sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
    return out
