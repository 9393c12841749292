"""The private names of PyTorch that operators use, each with its replacement if it is gone.

PyTorch changes them without notice. A version that lacks one is still served, slower and after one warning: if nothing public
tells whether a mode, a transform or a trace is on, one is assumed, and calls go through the dispatcher.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
_DISPATCHED = "every call goes through PyTorch's dispatcher"
_WARNED: set[str] = set()


def warn_gone(name: str, loss: str) -> None:
    """Warn, once a name, that the version at hand lacks it."""
    if name not in _WARNED:
        _WARNED.add(name)
        warnings.warn(f"{name} is gone: {loss}", RuntimeWarning, stacklevel=2)


def private(path: str, instead: Any, loss: str) -> Any:
    """``torch.<path>``; ``instead``, after a warning, if it is gone."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        warn_gone(f"torch.{path} of PyTorch {torch.__version__}", loss)
        return instead


class _NoGuards:
    """Guards that no tensors pass."""

    def __init__(self, *tensors: torch.Tensor, **dynamic: Any) -> None:
        pass

    def check(self, *tensors: torch.Tensor) -> bool:
        return False


class _Probe:
    """The level of forward-mode gradients, by public functions: they refuse a second one."""

    @property
    def _current_level(self) -> int:
        try:
            with forward_ad.dual_level():
                return -1
        except RuntimeError:
            return 0


def _taken_to_be_on() -> bool:
    return True


dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", _taken_to_be_on, _DISPATCHED)
function_modes: Callable[[], bool] = private("_C._is_torch_function_mode_enabled", _taken_to_be_on, _DISPATCHED)
function_transform: Callable[[], Any] = private("_C._functorch.peek_interpreter_stack", _taken_to_be_on, _DISPATCHED)
jit_trace: Callable[[], Any] = private("_C._get_tracing_state", _taken_to_be_on, _DISPATCHED)
any_autocast: Callable[[], bool] = private("_C._is_any_autocast_enabled", _taken_to_be_on, "each call asks for its device's")
TensorGuards: Any = private("_C._dynamo.guards.TensorGuards", _NoGuards, "every call is checked and bound anew")
below_autograd: Callable[[], AbstractContextManager[None]] | None = private(
    "_C._AutoDispatchBelowAutograd", None, "operators pass over autograd by the set of their keys"
)
without_keys: Callable[[torch.DispatchKey, bool], AbstractContextManager[None]] | None = private(
    "_C._SetExcludeDispatchKeyGuard", None, "gradients by PyTorch's operators are a transform's of torch.func"
)
# Its ``_current_level`` is below 0 without forward-mode gradients; to read that of the module takes no frame.
forward_level: Any = (
    _Probe() if private("autograd.forward_ad._current_level", None, "each call probes for it") is None else forward_ad
)


def empty_strided(on_gpu: bool) -> Allocate:
    """allocate(shape, strides, dtype) on the current GPU or the CPU, unseen by modes: what Inductor's own code allocates by."""
    device = "cuda" if on_gpu else "cpu"

    def public(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    allocate: Allocate = private(f"_C._dynamo.guards._empty_strided_{device}", public, "an allocation takes twice as long")
    return allocate


def of_no_memory() -> tuple[AbstractContextManager[Any], Callable[[torch.Tensor], torch.Tensor]]:
    """A context that computes nothing, and a function that makes its tensors from others."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        warn_gone("torch._subclasses.fake_tensor", "an explanation does not tell tensors of two devices apart")
        return nullcontext(), lambda tensor: tensor.to("meta")
    mode = FakeTensorMode()
    return mode, mode.from_tensor


def raw_stream() -> Callable[[int], int]:
    """stream(device): the handle of a GPU's current stream."""

    def public(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    stream: Callable[[int], int] = private("_C._cuda_getCurrentRawStream", public, "a launch takes longer")
    return stream


def symmetric_memory() -> Any:
    """PyTorch's module of memory that the GPUs of a group map into each other's. Raises RuntimeError: this PyTorch has none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise RuntimeError(f"PyTorch {torch.__version__} has no symmetric memory; transport must be 'collectives'") from error
    return _symmetric_memory
