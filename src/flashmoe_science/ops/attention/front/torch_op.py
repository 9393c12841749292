"""The operator ``flashmoe::attention_forward``, and the short path that eager calls take around the dispatcher.

torch.compile, export, fake tensors, modes and tensor subclasses see the operator. A plain eager call looks up its plan by a
key and launches: through the dispatcher it would cost 2.4 us more (docs/notes/launch-cost.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from math import isfinite
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import forward_ad

from flashmoe_science.ops.attention.call.inputs import output_strides
from flashmoe_science.ops.attention.call.spec import (
    AttentionSpec,
    Names,
    check_inputs,
    check_sizes,
    check_tensors,
    checked_scale,
)
from flashmoe_science.ops.attention.front.fallback import pytorch_attention
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.plan import MOST_CALLS, Cache, check_kernel_with_gradients, guards_of, is_plain

if TYPE_CHECKING:
    from flashmoe_science.dispatch.select import Decision
    from flashmoe_science.ops.attention.front.plans import BoundCall, Span


class Known(NamedTuple):
    """A bound call: whether tensors are like those it was bound to, and the numbers of keys that it serves. Where ``span`` is
    None that is one number, which ``fits`` looks at."""

    fits: Callable[..., bool]
    span: Span | None
    call: BoundCall


CALLS: Cache[Hashable, BoundCall] = Cache(MOST_CALLS)
KNOWN: Cache[Hashable, tuple[Known, ...]] = Cache(MOST_CALLS)
_MOST_ALIKE = 4  # calls of queries of one shape that differ in the strides or sizes of keys and values
_NAMES = Names("q", "k", "v", "softmax_scale")
_function_modes = torch._C._is_torch_function_mode_enabled


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    softmax_scale: float | None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention forward of [batch, heads, seqlen, head_dim] views; what every public attention function calls.

    Args:
        softmax_scale: None for head_dim ** -0.5.
        lse: where ``spec.return_lse``, a contiguous, 16-byte aligned fp32 tensor to fill in place of a new one.

    Returns:
        out [batch, heads, seqlen_q, head_dim_v]; lse [batch, heads, seqlen_q] fp32 natural log, or None if not asked for.

    Raises:
        TypeError, ValueError: what spec.py refuses, an unknown kernel, a kernel that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return _through_operator(q, k, v, spec, softmax_scale, lse)
    if softmax_scale is not None and not (type(softmax_scale) is float and isfinite(softmax_scale)):
        softmax_scale = checked_scale(softmax_scale, spec.names.scale)
    call = _known_call(q, k, v, spec, softmax_scale)
    if call is not None:
        return call(q, k, v, softmax_scale, lse)
    if not is_plain(q, k, v):
        return _through_operator(q, k, v, spec, softmax_scale, lse)
    return _run(q, k, v, spec, softmax_scale, lse, needs_grad(q, k, v), know=True)


def _known_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, softmax_scale: float | None
) -> BoundCall | None:
    """The call of plain tensors that are like others before, in half the time of a key."""
    try:
        known = KNOWN.get((q.shape, spec, softmax_scale is None or softmax_scale > 0.0, torch.is_grad_enabled()))
        # What ``could_be_known`` asks, without its call and its loop, which are a tenth of this look-up.
        if known is None or _function_modes() or forward_ad._current_level >= 0 or q.is_nested or k.is_nested or v.is_nested:
            return None
        for fits, span, call in known:
            if fits(q, k, v) and (span is None or _serves(span, k.shape[2], v.shape[2])):
                return None if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 else call
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or nested ones, which have no shape
        return None
    return None


def _serves(span: Span, keys: int, keys_v: int) -> bool:
    return span.first <= keys <= span.last and keys == keys_v and keys not in span.apart


def _know(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, positive: bool, known: Known) -> None:
    """Find the call by ``_known_call`` from now on, before those that were known. No tensor is held."""
    key = (q.shape, spec, positive, torch.is_grad_enabled())
    KNOWN[key] = (known, *KNOWN.get(key, ())[: _MOST_ALIKE - 1])


def decide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, softmax_scale: float | None) -> Decision:
    """What ``attend`` would serve the call by. Compiles the kernel; launches nothing. Raises as ``attend``."""
    check_tensors(q, k, v, spec.names)
    if softmax_scale is not None:
        softmax_scale = checked_scale(softmax_scale, spec.names.scale)
    plan, _ = _plans().make_plan(q, k, v, spec, softmax_scale, needs_grad(q, k, v))
    decision: Decision = plan.decision
    return decision


@cache
def _plans() -> ModuleType:
    """The module of plans, which brings Triton: an import of this one need not wait for it."""
    from flashmoe_science.ops.attention.front import plans

    return plans


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
    grad: bool,
    know: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Serve the call: bound before, or checked and bound now. ``know``: let ``_known_call`` find the next like it."""
    try:
        # All that decides a launch. Kernels treat a scale of 0 or less apart, and are specialised on 16-byte alignment.
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, spec, grad, softmax_scale is None or softmax_scale > 0.0,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 and (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15),
        )  # fmt: skip
    except RuntimeError:  # a nested or sparse tensor has no strides
        check_tensors(q, k, v, spec.names)
        raise
    call, span = CALLS.get(key), None
    met = call is not None
    if call is None:
        call, span = _plans().bind_call(key, q, k, v, softmax_scale)
        CALLS[key] = call
    # A call of one length not at first sight: a cache that grows by a token would make guards that no other call meets.
    if know and not key[15] and (met or span is not None):
        known = Known(guards_of((q, k, v), None if span is None else {1: 2, 2: 2}), span, call)
        _know(q, k, v, spec, key[14], known)
    return call(q, k, v, softmax_scale, lse)


def _through_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_tensors(q, k, v, spec.names)
    if torch.compiler.is_compiling():
        check_sizes(q, k, v, spec)
    else:
        check_inputs(q, k, v, spec)
    out, new_lse = _OPERATOR(q, k, v, spec.mask, softmax_scale, spec.return_lse, spec.kernel)
    if not spec.return_lse:
        return out, None
    return out, new_lse if lse is None else lse.copy_(new_lse)


# The operator ----------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("flashmoe", "DEF")
_LIBRARY.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, str mask, float? softmax_scale=None, bool return_lse=False, "
    "str? kernel_name=None) -> (Tensor out, Tensor lse)",  # Inductor has a parameter "kernel" of its own
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel_name: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on CPU and CUDA: ``lse`` is empty where it was not asked for."""
    if softmax_scale is not None:
        softmax_scale = checked_scale(softmax_scale, _NAMES.scale)
    out, lse = _run(q, k, v, AttentionSpec(mask, return_lse, kernel=kernel_name), softmax_scale, None, grad=False, know=False)
    strides = output_strides(q, v.shape[3])
    if out.stride() != strides:  # as PyTorch and the peers may choose; a compiled graph relies on what _fake promised
        out = out.new_empty_strided(out.shape, strides).copy_(out)
    return out, lse_or_empty(q, lse)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel_name: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of ``_forward`` without the work."""
    check_tensors(q, k, v, _NAMES)
    check_sizes(q, k, v, AttentionSpec(mask))
    width = v.shape[3]
    out = q.new_empty_strided((*q.shape[:3], width), output_strides(q, width))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    return out, lse_or_empty(q, lse)


def _with_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel_name: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator where autograd is at work: PyTorch's attention, which has a derivative, if one may be asked for."""
    if not needs_grad(q, k, v) and forward_ad._current_level < 0:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATOR(q, k, v, mask, softmax_scale, return_lse, kernel_name)  # type: ignore[no-any-return]
    check_tensors(q, k, v, _NAMES)
    check_sizes(q, k, v, AttentionSpec(mask))
    check_kernel_with_gradients(kernel_name, PYTORCH)
    out, lse = pytorch_attention(q, k, v, mask, softmax_scale, return_lse)
    return out, lse_or_empty(q, lse)


def lse_or_empty(q: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """The log-sum-exp as an operator returns it, which cannot return None."""
    return q.new_empty(0, dtype=torch.float32) if lse is None else lse


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_forward", _forward, _key)
_LIBRARY.impl("attention_forward", _with_autograd, "Autograd")
torch.library.register_fake("flashmoe::attention_forward", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.attention_forward.default
