"""Attention with modes: the operator ``flashmoe::attention_modes``, and the short path that eager calls take around it.

torch.compile, export, fake tensors, modes and tensor subclasses see the operator. modes_calls.py has what serves it.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch.autograd import forward_ad

from flashmoe_science.ops.attention.call.inputs import output_strides
from flashmoe_science.ops.attention.call.modes_spec import (
    ModeNames,
    ModesSpec,
    check_agreement,
    check_modes,
    check_splits,
    modes_of,
)
from flashmoe_science.ops.attention.call.spec import AttentionSpec, Names, checked_scale
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.front.modes_calls import Result, call_for, needs_grad
from flashmoe_science.ops.attention.front.modes_fallback import modes_attention
from flashmoe_science.ops.attention.front.torch_op import attend, lse_or_empty
from flashmoe_science.ops.attention.problem import MAX_HEAD_DIM, Mask
from flashmoe_science.ops.attention.problem.features import Extras, Modes
from flashmoe_science.ops.plan import check_kernel_with_gradients, is_plain

_NAMES, _OTHERS = Names("q", "k", "v", "softmax_scale"), ModeNames()


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
    """softmax(Q K^T * scale, with the modes) V of views as features.py has them; what every public function with modes calls.

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
    check_agreement(k, extras, modes)
    spec = ModesSpec(mask, modes.window_left, modes.window_right, return_lse, kernel, num_splits, names, others)
    return attend_with(q, k, v, extras, spec, softmax_scale)


def attend_with(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, softmax_scale: float | None
) -> Result:
    """``attend_modes`` with the modes that the extras make."""
    if extras.cache_seqlens is None and _is_plain_call(q, k, v, extras, spec):
        return attend(q, k, v, AttentionSpec(spec.mask, spec.return_lse, kernel=spec.kernel, names=spec.names), softmax_scale)
    if softmax_scale is not None and not (type(softmax_scale) is float and isfinite(softmax_scale)):
        softmax_scale = checked_scale(softmax_scale, spec.names.scale)
    if torch.compiler.is_compiling() or not is_plain(q, k, v):
        return _through_operator(q, k, v, extras, spec, softmax_scale)
    return call_for(q, k, v, extras, spec, softmax_scale, needs_grad(q, k, v, extras)).run(q, k, v, extras, softmax_scale)


def _is_plain_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec) -> bool:
    """Whether the call has no mode at all, nor a head that only the fallback of modes takes: it is ``attend``'s then."""
    return (
        spec.window_left is None
        and spec.window_right is None
        and spec.num_splits == 0
        and extras.softcap == 0.0
        and all(one is None for one in extras.tensors())
        and k.dtype == q.dtype
        and q.shape[-1] <= MAX_HEAD_DIM >= v.shape[-1]
    )


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


def _through_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, spec: ModesSpec, scale: float | None
) -> Result:
    check_modes(q, k, v, extras, spec)
    check_splits(spec.num_splits)
    e = extras
    out, lse = _OPERATOR(
        q, k, v, spec.mask, spec.window_left, spec.window_right, e.cu_seqlens_q, e.cu_seqlens_k, e.cache_seqlens, e.page_table,
        e.cache_batch_idx, e.leftpad, e.max_seqlen_q, e.max_seqlen_k, e.softcap, e.sinks, e.alibi_slopes, e.bias, e.prefix,
        e.k_scale, e.v_scale, scale, spec.return_lse, spec.num_splits, spec.kernel,
    )  # fmt: skip
    return out, lse if spec.return_lse else None


def _bound(q: torch.Tensor, k: torch.Tensor, mask: Mask, *rest: Any) -> tuple[Extras, ModesSpec, float | None]:
    """The operator's other arguments as Extras, a spec and the scale."""
    (
        left, right, cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpad, max_seqlen_q,
        max_seqlen_k, softcap, sinks, alibi_slopes, bias, prefix, k_scale, v_scale, *options,
    ) = rest  # fmt: skip
    extras = Extras(
        cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpad, max_seqlen_q, max_seqlen_k, softcap,
        sinks, alibi_slopes, bias, prefix, k_scale, v_scale,
    )  # fmt: skip
    defaults: tuple[Any, ...] = (None, False, 0, None)
    scale, return_lse, num_splits, kernel = (*options, *defaults[len(options) :])
    return extras, ModesSpec(mask, left, right, return_lse, kernel, num_splits), scale


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on CPU and CUDA: ``lse`` is empty where it was not asked for."""
    extras, spec, scale = _bound(q, k, mask, *rest)
    if scale is not None:
        scale = checked_scale(scale, _NAMES.scale)
    out, lse = call_for(q, k, v, extras, spec, scale, grad=False).run(q, k, v, extras, scale)
    strides = output_strides(q, v.shape[3])
    if out.stride() != strides:  # a compiled graph relies on what _fake promised
        out = out.new_empty_strided(out.shape, strides).copy_(out)
    return out, lse_or_empty(q, lse if lse is None else lse.contiguous())


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of ``_forward`` without the work."""
    _, spec, _ = _bound(q, k, mask, *rest)
    out = q.new_empty_strided((*q.shape[:3], v.shape[3]), output_strides(q, v.shape[3]))
    return out, lse_or_empty(q, q.new_empty(q.shape[:3], dtype=torch.float32) if spec.return_lse else None)


def _with_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator where autograd is at work: PyTorch's operators, which have derivatives, if one may be asked for."""
    extras, spec, scale = _bound(q, k, mask, *rest)
    if not needs_grad(q, k, v, extras) and forward_ad._current_level < 0:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATOR(q, k, v, mask, *rest)  # type: ignore[no-any-return]
    check_modes(q, k, v, extras, spec)
    check_kernel_with_gradients(spec.kernel, PYTORCH)
    modes = modes_of(k, extras, spec.window_left, spec.window_right)
    out, lse = modes_attention(q, k, v, mask, modes, extras, scale, spec.return_lse)
    return out, lse_or_empty(q, lse)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_modes", _forward, _key)
_LIBRARY.impl("attention_modes", _with_autograd, "Autograd")
torch.library.register_fake("flashmoe::attention_modes", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.attention_modes.default
