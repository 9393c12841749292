"""What serves a call of attention with modes, and why.

Our kernel of split_triton.py serves it, or PyTorch's operators (modes_fallback.py) where that kernel cannot or a gradient is
needed. What was found for a call is kept by a key of all that it is but its values, and holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionKernel
from flashmoe_science.ops.attention.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.modes import Extras
from flashmoe_science.ops.attention.modes_fallback import modes_attention
from flashmoe_science.ops.attention.modes_spec import ModesSpec, check_modes, check_splits, problem_with_modes
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.plan import (
    MOST_CALLS,
    NO_BACKWARD,
    Cache,
    check_kernel_with_gradients,
    device_guard,
    with_launch_path,
)
from flashmoe_science.problem import ProblemError

Result = tuple[torch.Tensor, torch.Tensor | None]


class Call(NamedTuple):
    """What serves calls of one kind, and why."""

    decision: Decision
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Extras, float | None], Result]


CALLS: Cache[Hashable, Call] = Cache(MOST_CALLS)


def decide_modes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec) -> Decision:
    """What ``attend_modes`` would serve the call by, and why; launches nothing. Raises as ``attend_modes``."""
    return call_for(q, k, v, extras, spec, None, needs_grad(q, k, v, extras)).decision


def takes_modes(kernel: str) -> bool:
    """Whether a kernel of that name is one of ours that takes modes."""
    return kernel in {one.name for one in _kernels()}


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras) -> bool:
    """Whether a gradient may be asked for."""
    if not torch.is_grad_enabled():
        return False
    learned = (q, k, v, extras.sinks, extras.alibi_slopes, extras.bias)
    return any(one is not None and one.requires_grad for one in learned)


def call_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, scale: float | None, grad: bool
) -> Call:
    """How the call is served: found before, or checked and found now."""
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, spec, grad, scale is None or scale > 0.0,
            extras.max_seqlen_q, extras.max_seqlen_k, extras.softcap > 0.0,
            *[None if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in _tensors(extras)],
        )  # fmt: skip
        call = CALLS.get(key)
    except (RuntimeError, AttributeError, TypeError):  # not tensors, or tensors that have no strides
        check_modes(q, k, v, extras, spec)
        raise
    if call is None:
        call = CALLS[key] = _makecall_for(q, k, v, extras, spec, grad)
    return call


def _tensors(extras: Extras) -> tuple[torch.Tensor | None, ...]:
    return (
        extras.cu_seqlens_q, extras.cu_seqlens_k, extras.cache_seqlens, extras.page_table, extras.cache_batch_idx,
        extras.leftpad, extras.sinks, extras.alibi_slopes, extras.bias, extras.prefix, extras.k_scale, extras.v_scale,
    )  # fmt: skip


# Which kernel ----------------------------------------------------------------------------------------------------------------


@cache
def _kernels() -> tuple[AttentionKernel, ...]:
    """Our kernels that take modes, the preferred first."""
    if TRITON_MISSING or find_spec("flashmoe_science.ops.attention.split_triton") is None:
        return ()
    from flashmoe_science.ops.attention import split_triton

    return (split_triton.KERNEL,)


def _makecall_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, grad: bool) -> Call:
    """Check the inputs and choose. Raises as ``attend_modes``."""
    check_modes(q, k, v, extras, spec)
    check_splits(spec.num_splits)
    requested = None if spec.kernel is None else kernel_named(spec.kernel, AttentionProblem.op)
    if requested is not None and requested.name == PYTORCH:
        return _by_pytorch(spec, Decision(PYTORCH, Config(), "asked for by name", "requested"))
    if grad:
        check_kernel_with_gradients(spec.kernel, PYTORCH)
        return _by_pytorch(spec, Decision(PYTORCH, Config(), NO_BACKWARD, "required"))
    kernel, reason = _chosen(q, k, v, extras, spec)
    if requested is not None:
        if kernel is None or kernel.name != requested.name:
            why = reason if requested.name in {one.name for one in _kernels()} else "it takes no modes"
            raise CannotServe(f"kernel {spec.kernel!r} cannot serve this call: {why}; {PYTORCH!r} can")
        reason = "asked for by name"
    if kernel is None:
        return _by_pytorch(spec, Decision(PYTORCH, Config(), reason, "required"))
    problem = problem_with_modes(q, k, v, spec.mask, spec.modes, extras)
    config = kernel.configs(problem, current_gpu(q.device) if q.is_cuda else None)[0]
    decision = Decision(kernel.name, config, reason, "modelled" if requested is None else "requested")
    return Call(with_launch_path(decision), device_guard(q.get_device())(partial(_by_kernel, problem, spec)))


def _chosen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec
) -> tuple[AttentionKernel | None, str]:
    """The kernel that serves, or None for PyTorch's operators; and why."""
    gpu = current_gpu(q.device) if q.is_cuda else None
    if q.is_cuda and gpu is None:
        return None, f"{q.device} is not an NVIDIA GPU, and our kernels need one"
    try:
        problem = problem_with_modes(q, k, v, spec.mask, spec.modes, extras)
    except ProblemError as error:
        return None, f"no kernel of ours takes the input: {error}"
    if 0 in (*q.shape, *k.shape):
        return None, "a size is 0, so there is nothing to compute"
    reasons = []
    for kernel in _kernels():
        reason = kernel.cannot(problem, gpu)
        if reason is None:
            return kernel, "the kernel of ours that takes every mode"
        reasons.append(f"{kernel.name}: {reason}")
    return None, "; ".join(reasons) or str(TRITON_MISSING or "there is no kernel of ours for it")


def _by_kernel(
    problem: AttentionProblem,
    spec: ModesSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    scale: float | None,
) -> Result:
    from flashmoe_science.ops.attention import split_triton

    scale = problem.softmax_scale if scale is None else scale
    result = split_triton.attend(AttentionInputs(problem, q, k, v, scale, spec.return_lse, None, extras), spec.num_splits)
    return result.out, result.lse


def _by_pytorch(spec: ModesSpec, decision: Decision) -> Call:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, scale: float | None) -> Result:
        return modes_attention(q, k, v, spec.mask, spec.modes, extras, scale, spec.return_lse)

    return Call(decision, run)
