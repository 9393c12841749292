"""What serves attention with modes, the operator ``flashmoe::attention_modes``, and the short path of eager calls around it.

A call is served by our kernel of split_triton.py, or by PyTorch's operators (modes_fallback.py) where that kernel cannot or a
gradient is needed. What was found for a call is kept by a key of all that it is but its values, and holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib.util import find_spec
from math import isfinite
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionKernel, output_strides
from flashmoe_science.ops.attention.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.modes import Extras, Modes
from flashmoe_science.ops.attention.modes_fallback import modes_attention
from flashmoe_science.ops.attention.modes_spec import (
    ModeNames,
    ModesSpec,
    check_modes,
    check_splits,
    modes_of,
    problem_with_modes,
)
from flashmoe_science.ops.attention.problem import AttentionProblem, Mask
from flashmoe_science.ops.attention.spec import Names, checked_scale
from flashmoe_science.ops.plan import (
    MOST_CALLS,
    NO_BACKWARD,
    Cache,
    check_kernel_with_gradients,
    device_guard,
    is_plain,
    with_launch_path,
)
from flashmoe_science.problem import ProblemError

_NAMES, _OTHERS = Names("q", "k", "v", "softmax_scale"), ModeNames()
Result = tuple[torch.Tensor, torch.Tensor | None]


class Call(NamedTuple):
    """What serves calls of one kind, and why."""

    decision: Decision
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Extras, float | None], Result]


CALLS: Cache[Hashable, Call] = Cache(MOST_CALLS)


def attend_modes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    modes: Modes,
    extras: Extras,
    *,
    mask: Mask = "full",
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    num_splits: int = 0,
    names: Names = _NAMES,
    others: ModeNames = _OTHERS,
) -> Result:
    """softmax(Q K^T * scale, with the modes) V of views as modes.py has them; what every public function with modes calls.

    Args:
        modes, extras: which modes, and their tensors; ``modes_spec.modes_of`` makes the first from the second.
        mask: "causal" is aligned bottom-right in each sequence, "causal-topleft" as PyTorch's ``is_causal``.
        softmax_scale: None for head_dim ** -0.5.
        return_lse: also return the log-sum-exp, sinks included, natural logarithm.
        kernel: serve by this kernel or raise; by default our kernel where it can.
        num_splits: into how many pieces the keys of a sequence are split; 0 for the kernel's choice, 1 for a result that does
            not depend on the batch.
        names, others: what the caller's own arguments are called, for messages.

    Returns:
        out in the shape and memory order of ``q`` with the width of ``v``, zeros for a row that sees no key; and the
        log-sum-exp, ``out`` without its last dimension, fp32, -inf there (a sink's logit where there are sinks), or None.

    Raises:
        TypeError, ValueError: an argument that is not allowed, an unknown kernel, a kernel that cannot serve the call.
    """
    if softmax_scale is not None and not (type(softmax_scale) is float and isfinite(softmax_scale)):
        softmax_scale = checked_scale(softmax_scale, names.scale)
    spec = ModesSpec(mask, modes, return_lse, kernel, num_splits, names, others)
    if torch.compiler.is_compiling() or not is_plain(q, k, v):
        return _through_operator(q, k, v, extras, spec, softmax_scale)
    return _call(q, k, v, extras, spec, softmax_scale, needs_grad(q, k, v, extras)).run(q, k, v, extras, softmax_scale)


def decide_modes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec) -> Decision:
    """What ``attend_modes`` would serve the call by, and why; launches nothing. Raises as ``attend_modes``."""
    return _call(q, k, v, extras, spec, None, needs_grad(q, k, v, extras)).decision


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras) -> bool:
    """Whether a gradient may be asked for."""
    if not torch.is_grad_enabled():
        return False
    learned = (q, k, v, extras.sinks, extras.alibi_slopes, extras.bias)
    return any(one is not None and one.requires_grad for one in learned)


def _call(
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
        call = CALLS[key] = _make_call(q, k, v, extras, spec, grad)
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


def _make_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, grad: bool) -> Call:
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


# The operator ----------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("flashmoe", "FRAGMENT")
_LIBRARY.define(
    "attention_modes(Tensor q, Tensor k, Tensor v, str mask, int? window_left, int? window_right, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx, Tensor? leftpad, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? bias, "
    "Tensor? prefix, Tensor? k_scale, Tensor? v_scale, float? softmax_scale=None, bool return_lse=False, int num_splits=0, "
    "str? kernel_name=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_Optional = torch.Tensor | None


def _through_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, scale: float | None
) -> Result:
    check_modes(q, k, v, extras, spec)
    check_splits(spec.num_splits)
    e, m = extras, spec.modes
    out, lse = _OPERATOR(
        q, k, v, spec.mask, m.window_left, m.window_right, e.cu_seqlens_q, e.cu_seqlens_k, e.cache_seqlens, e.page_table,
        e.cache_batch_idx, e.leftpad, e.max_seqlen_q, e.max_seqlen_k, e.softcap, e.sinks, e.alibi_slopes, e.bias, e.prefix,
        e.k_scale, e.v_scale, scale, spec.return_lse, spec.num_splits, spec.kernel,
    )  # fmt: skip
    return out, lse if spec.return_lse else None


def _bound(q: torch.Tensor, k: torch.Tensor, mask: Mask, *rest: object) -> tuple[Extras, ModesSpec, float | None]:
    """The operator's other arguments as Extras, a spec and the scale."""
    (
        left, right, cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpad, max_seqlen_q,
        max_seqlen_k, softcap, sinks, alibi_slopes, bias, prefix, k_scale, v_scale, *options,
    ) = rest  # fmt: skip
    extras = Extras(
        cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpad, max_seqlen_q, max_seqlen_k, softcap,
        sinks, alibi_slopes, bias, prefix, k_scale, v_scale,
    )  # type: ignore[arg-type]  # fmt: skip  # the schema says which is which
    scale, return_lse, num_splits, kernel = (*options, *(None, False, 0, None)[len(options) :])
    modes = modes_of(k, extras, left, right)  # type: ignore[arg-type]
    return extras, ModesSpec(mask, modes, return_lse, kernel, num_splits), scale  # type: ignore[arg-type, return-value]


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on CPU and CUDA: ``lse`` is empty where it was not asked for."""
    extras, spec, scale = _bound(q, k, mask, *rest)
    if scale is not None:
        scale = checked_scale(scale, _NAMES.scale)
    out, lse = _call(q, k, v, extras, spec, scale, grad=False).run(q, k, v, extras, scale)
    strides = output_strides(q, v.shape[3])
    if out.stride() != strides:  # a compiled graph relies on what _fake promised
        out = out.new_empty_strided(out.shape, strides).copy_(out)
    return out, _lse_or_empty(q, lse if lse is None else lse.contiguous())


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of ``_forward`` without the work."""
    _, spec, _ = _bound(q, k, mask, *rest)
    out = q.new_empty_strided((*q.shape[:3], v.shape[3]), output_strides(q, v.shape[3]))
    return out, _lse_or_empty(q, q.new_empty(q.shape[:3], dtype=torch.float32) if spec.return_lse else None)


def _with_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator where autograd is at work: PyTorch's operators, which have derivatives, if one may be asked for."""
    extras, spec, scale = _bound(q, k, mask, *rest)
    if not needs_grad(q, k, v, extras) and forward_ad._current_level < 0:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATOR(q, k, v, mask, *rest)  # type: ignore[no-any-return]
    check_modes(q, k, v, extras, spec)
    check_kernel_with_gradients(spec.kernel, PYTORCH)
    out, lse = modes_attention(q, k, v, mask, spec.modes, extras, scale, spec.return_lse)
    return out, _lse_or_empty(q, lse)


def _lse_or_empty(q: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32) if lse is None else lse


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_modes", _forward, _key)
_LIBRARY.impl("attention_modes", _with_autograd, "Autograd")
torch.library.register_fake("flashmoe::attention_modes", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.attention_modes.default
