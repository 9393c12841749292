"""The operator ``flashmoe::attention_forward``, and the short path that eager calls take around the dispatcher.

torch.compile, export, fake tensors, modes and tensor subclasses see the operator. A plain eager call looks up its plan by a
key and launches: through the dispatcher it would cost 2.4 us more (docs/notes/launch-cost.md).
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic

from flashmoe_science.ops.attention.fallback import check_kernel_with_gradients, pytorch_attention
from flashmoe_science.ops.attention.inputs import output_strides
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.attention.spec import Names, check_sizes, check_tensors, checked_scale

if TYPE_CHECKING:
    from flashmoe_science.ops.attention.plans import Plan

MAX_PLANS = 4096  # each shape of a call is a plan; a server of ever new shapes starts over here instead of growing
_PLANS: dict[tuple[object, ...], Plan] = {}
_NAMES = Names("q", "k", "v", "softmax_scale")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._get_tracing_state


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None,
    return_lse: bool,
    kernel: str | None = None,
    gqa: bool = True,
    names: Names = _NAMES,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention forward of [batch, heads, seqlen, head_dim] views; what every public attention function calls.

    Args:
        mask: of AttentionProblem.
        softmax_scale: None for head_dim ** -0.5.
        kernel: serve by this kernel or raise; None for the automatic choice.
        gqa: whether K and V may have fewer heads than Q.
        names: what the caller calls the arguments, for messages.
        lse: where ``return_lse``, a contiguous, 16-byte aligned fp32 tensor to fill in place of a new one.

    Returns:
        out [batch, heads, seqlen_q, head_dim_v]; lse [batch, heads, seqlen_q] fp32 natural log, or None if not asked for.

    Raises:
        TypeError, ValueError: what ops/checks.py refuses, an unknown kernel, a kernel that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return _through_operator(q, k, v, mask, softmax_scale, return_lse, kernel, gqa, names, lse)
    if softmax_scale is not None and not (type(softmax_scale) is float and isfinite(softmax_scale)):
        softmax_scale = checked_scale(softmax_scale, names.scale)
    if not (
        # The tensors' memory is all there is to them: no subclass, mode, transform or trace needs to see the call.
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not has_torch_function_variadic(q, k, v)
        and not _dispatch_modes()
        and _function_transform() is None
        and _jit_trace() is None
        and forward_ad._current_level < 0
    ):
        return _through_operator(q, k, v, mask, softmax_scale, return_lse, kernel, gqa, names, lse)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return _run_planned(q, k, v, mask, softmax_scale, return_lse, kernel, gqa, needs_grad, names, lse)


def _run_planned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None,
    return_lse: bool,
    kernel: str | None,
    gqa: bool,
    needs_grad: bool,
    names: Names,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Serve the call by the plan of its kind: from the cache, or checked, chosen and compiled now."""
    try:
        # All that decides a launch. Kernels treat a scale of 0 or less apart, and are specialised on 16-byte alignment.
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.get_device(), v.get_device(), mask, return_lse, kernel, gqa, needs_grad,
            softmax_scale is None or softmax_scale > 0.0,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 and (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15),
        )  # fmt: skip
    except RuntimeError:  # a nested or sparse tensor has no strides
        check_tensors(q, k, v, names)
        raise
    try:
        plan = _PLANS.get(key)
    except TypeError:  # a kernel's name of an unhashable type: make_plan says what it must be
        plan = None
    if plan is None:
        plan = make_plan(q, k, v, mask, softmax_scale, return_lse, kernel, gqa, needs_grad, names)
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan.run(q, k, v, softmax_scale, lse)


def make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None,
    return_lse: bool,
    kernel: str | None,
    gqa: bool,
    needs_grad: bool,
    names: Names,
) -> Plan:
    """``plans.make_plan``, imported on first use: it brings Triton, for which ``import flashmoe_science`` need not wait."""
    from flashmoe_science.ops.attention import plans

    return plans.make_plan(plans.Request(q, k, v, mask, softmax_scale, return_lse, kernel, gqa, needs_grad, names))


def _through_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None,
    return_lse: bool,
    kernel: str | None,
    gqa: bool,
    names: Names,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_tensors(q, k, v, names)
    check_sizes(q, k, v, names, gqa)
    out, new_lse = _OPERATOR(q, k, v, mask, softmax_scale, return_lse, kernel)
    if not return_lse:
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
    out, lse = _run_planned(q, k, v, mask, softmax_scale, return_lse, kernel_name, True, False, _NAMES, None)
    strides = output_strides(q, v.shape[3])
    if out.stride() != strides:  # as PyTorch and the peers may choose; a compiled graph relies on what _fake promised
        out = out.new_empty_strided(out.shape, strides).copy_(out)
    return out, _lse_or_empty(q, lse)


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
    check_sizes(q, k, v, _NAMES, gqa=True)
    width = v.shape[3]
    out = q.new_empty_strided((*q.shape[:3], width), output_strides(q, width))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    return out, _lse_or_empty(q, lse)


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
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not needs_grad and forward_ad._current_level < 0:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATOR(q, k, v, mask, softmax_scale, return_lse, kernel_name)  # type: ignore[no-any-return]
    check_tensors(q, k, v, _NAMES)
    check_sizes(q, k, v, _NAMES, gqa=True)
    check_kernel_with_gradients(kernel_name)
    out, lse = pytorch_attention(q, k, v, mask, softmax_scale, return_lse)
    return out, _lse_or_empty(q, lse)


def _lse_or_empty(q: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32) if lse is None else lse


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_forward", _forward, _key)
_LIBRARY.impl("attention_forward", _with_autograd, "Autograd")
torch.library.register_fake("flashmoe::attention_forward", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.attention_forward.default
