"""The public attention functions: PyTorch's signature, FlashAttention's, and the two of this project's own documents.

All compute exact attention, softmax(Q K^T * scale + mask) V, in fp16, bf16 or fp32, with head dimensions 1 to 256. They
differ in layout and in where the causal mask is aligned when Q and K have different lengths. Tensors on the CPU, and inputs
that require gradients, are served by PyTorch's own attention. ``explain`` says what serves a call, and why.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.attention.spec import (
    AttentionSpec,
    Names,
    Unserved,
    check_flag,
    check_mask_argument,
    check_name,
    check_probability,
    check_tensors,
    check_window,
    checked_scale,
)
from flashmoe_science.ops.attention.torch_op import attend, decide

_TORCH_NAMES = Names("query", "key", "value", "scale")
_DOCUMENT_NAMES = Names("Q", "K", "V", "softmax_scale")
# Specs of FlashAttention's signature, by (causal, whether the log-sum-exp is asked for).
_FLASH = {
    (causal, lse): AttentionSpec("causal" if causal else "full", lse) for causal in (False, True) for lse in (False, True)
}
_DOCUMENT = {causal: AttentionSpec("causal" if causal else "full", True, names=_DOCUMENT_NAMES) for causal in (False, True)}


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | None = None,
) -> torch.Tensor:
    """Attention with the signature and the semantics of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: [batch, heads, seqlen_q, head_dim], any strides whose last dimension is contiguous.
        key, value: [batch, heads_kv, seqlen_k, head_dim] and [batch, heads_kv, seqlen_k, head_dim_v].
        attn_mask: boolean (True takes part) or of the query's dtype (added), broadcastable to
            [batch, heads, seqlen_q, seqlen_k]. Served by PyTorch's own attention.
        dropout_p: above 0, served by PyTorch's own attention.
        is_causal: query i sees keys 0 to i (aligned top-left, as in PyTorch).
        scale: of the scores; head_dim ** -0.5 by default.
        enable_gqa: let heads_kv be a divisor of heads.
        kernel: serve by this kernel (``flashmoe explain`` names them) or raise; by default the best for the problem.

    Other inputs that PyTorch's function takes (3-D or 5-D, fp64, a batch of 1 that broadcasts, sizes of 0, head dimensions
    above 256, a last dimension that is not contiguous) are given to it.

    Returns:
        [batch, heads, seqlen_q, head_dim_v] in the dtype and the memory order of ``query``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, or a ``kernel`` that cannot serve the call, in one line.
    """
    if torch._C._is_any_autocast_enabled():
        query, key, value = _autocast(query, key, value)
    spec = _torch_spec(is_causal, enable_gqa, kernel)
    rest = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None or dropout_p != 0.0:
        return _by_pytorch(query, key, value, *rest, kernel, None)
    try:
        return attend(query, key, value, spec, scale)[0]
    except Unserved as refusal:
        return _by_pytorch(query, key, value, *rest, kernel, refusal)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | None = None,
) -> Decision:
    """What serves ``scaled_dot_product_attention`` with the same arguments, and why. Compiles the kernel; launches nothing.

    Raises:
        TypeError, ValueError: what the call itself would raise.
    """
    if torch._C._is_any_autocast_enabled():
        query, key, value = _autocast(query, key, value)
    spec = _torch_spec(is_causal, enable_gqa, kernel)
    if attn_mask is not None or dropout_p != 0.0:
        what = "attn_mask is given" if attn_mask is not None else f"dropout_p is {dropout_p}"
        reason, refusal = f"{what}, which no kernel of ours takes yet", None
    else:
        try:
            return decide(query, key, value, spec, scale)
        except Unserved as unserved:
            reason, refusal = f"no kernel of ours takes the input: {unserved}", unserved
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:  # what PyTorch refuses, found without computing
        q, k, v, mask = (
            mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in (query, key, value, attn_mask)
        )
        _by_pytorch(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, kernel, refusal)  # type: ignore[arg-type]
    return Decision(PYTORCH, Config(), reason, "required")


def _torch_spec(is_causal: bool, enable_gqa: bool, kernel: str | None) -> AttentionSpec:
    if is_causal is not False:
        check_flag(is_causal, "is_causal")
    if enable_gqa is not False:
        check_flag(enable_gqa, "enable_gqa")
    if kernel is not None:
        check_name(kernel, "kernel")
    mask: Mask = "causal-topleft" if is_causal else "full"
    return AttentionSpec(mask, False, enable_gqa, kernel, False, _TORCH_NAMES)


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
    refusal: Unserved | None,
) -> torch.Tensor:
    """PyTorch's own function. What it refuses is refused in our words, where they say what is wrong (``refusal``: if found)."""
    if kernel is not None:
        _check_kernel(kernel, attn_mask, refusal)
    if scale is not None:
        scale = checked_scale(scale, "scale")
    try:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if refusal is not None:
            raise refusal from error
        check_tensors(query, key, value, _TORCH_NAMES)
        if attn_mask is not None:
            check_mask_argument(attn_mask, query, key, _TORCH_NAMES)
        check_probability(dropout_p, "dropout_p")
        raise


def _check_kernel(kernel: str, attn_mask: torch.Tensor | None, refusal: Unserved | None) -> None:
    from flashmoe_science.operations import kernel_named  # it brings Triton: not at import

    if kernel_named(kernel).name == PYTORCH:
        return
    if refusal is not None:
        raise refusal
    argument = "attn_mask" if attn_mask is not None else "dropout_p"
    raise CannotServe(f"kernel {kernel!r} takes no {argument}; {PYTORCH!r} does")


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast as PyTorch's own function does under torch.autocast: floating tensors other than fp64 to the autocast dtype."""
    cast_tensors = []
    for tensor in tensors:
        eligible = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        if eligible and torch.is_autocast_enabled(tensor.device.type):
            tensor = tensor.to(torch.get_autocast_dtype(tensor.device.type))
        cast_tensors.append(tensor)
    return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", tuple(cast_tensors))


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attention with the signature and the semantics of FlashAttention 2's ``flash_attn_func``.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        k, v: [batch, seqlen_k, heads_kv, head_dim] (v may have another head_dim); heads_kv divides heads.
        softmax_scale: of the scores; head_dim ** -0.5 by default.
        causal: the last query sees the last key (aligned bottom-right); a query that sees no key gets zeros.
        return_attn_probs: also return the log-sum-exp, and None in the place of the dropout mask.
        dropout_p, window_size, softcap, alibi_slopes, deterministic: only their defaults are served so far
            (``deterministic`` matters to the backward only, and is allowed where no input requires gradients).

    Returns:
        out [batch, seqlen_q, heads, head_dim_v]; with ``return_attn_probs`` (out, lse [batch, heads, seqlen_q] fp32, None).

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
        NotImplementedError: an option that no kernel serves yet.
    """
    if dropout_p != 0.0 or window_size != (-1, -1) or softcap != 0.0 or alibi_slopes is not None or deterministic:
        _refuse_options((q, k, v), dropout_p, window_size, softcap, alibi_slopes, deterministic)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)) or not (
        q.dim() == k.dim() == v.dim() == 4
    ):
        check_tensors(q, k, v, _FLASH[False, False].names)
    check_flag(causal, "causal")
    check_flag(return_attn_probs, "return_attn_probs")
    spec = _FLASH[causal, return_attn_probs]
    out, lse = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec, softmax_scale)
    out = out.transpose(1, 2)
    return (out, lse, None) if lse is not None else out


def _refuse_options(
    tensors: tuple[torch.Tensor, ...],
    dropout_p: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; no kernel serves dropout yet, so it must be 0.0")
    check_window(window_size)
    if tuple(window_size) != (-1, -1):
        raise NotImplementedError(f"window_size is {window_size}; no kernel serves a window yet, so it must be (-1, -1)")
    if softcap != 0.0:
        raise NotImplementedError(f"softcap is {softcap}; no kernel serves a softcap yet, so it must be 0.0")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is given; no kernel serves ALiBi yet, so it must be None")
    if deterministic and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            "deterministic is True and an input requires gradients; PyTorch's backward, which serves it, does not promise that"
        )


def flash_attention_science(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """Attention of [batch, heads, seqlen, head_dim] tensors.

    Args:
        q: [batch, heads, seqlen_q, head_dim]; k and v: [batch, heads_kv, seqlen_k, ...], heads_kv a divisor of heads.
        causal: the last query sees the last key (aligned bottom-right).
        softmax_scale: of the scores; head_dim ** -0.5 by default.

    Returns:
        [batch, heads, seqlen_q, head_dim_v] in the dtype and the memory order of ``q``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    check_flag(causal, "causal")
    return attend(q, k, v, _FLASH[causal, False], softmax_scale)[0]


def flash_attention_forward(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    softmax_lse: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
) -> torch.Tensor:
    """``flash_attention_science`` that also fills ``softmax_lse``.

    Args:
        Q, K, V, causal, softmax_scale: as there.
        softmax_lse: fp32, contiguous, [batch, heads, seqlen_q] or flat with as many elements: overwritten with the natural
            logarithm of each row's sum of exponentials, -inf where a query sees no key.

    Returns:
        [batch, heads, seqlen_q, head_dim_v] in the dtype and the memory order of ``Q``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    check_tensors(Q, K, V, _DOCUMENT_NAMES)
    lse = _lse_view(softmax_lse, Q)
    check_flag(causal, "causal")
    if torch.compiler.is_compiling() or lse.data_ptr() % 16 == 0:
        return attend(Q, K, V, _DOCUMENT[causal], softmax_scale, lse)[0]
    out, aligned = attend(Q, K, V, _DOCUMENT[causal], softmax_scale)
    assert aligned is not None
    lse.copy_(aligned)
    return out


def _lse_view(softmax_lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``softmax_lse`` as [batch, heads, seqlen_q].

    Raises:
        TypeError: not an fp32 tensor.
        ValueError: another shape or device, not contiguous, or in need of gradients.
    """
    if not isinstance(softmax_lse, torch.Tensor):
        raise TypeError(f"softmax_lse is a {type(softmax_lse).__name__}; it must be a torch.Tensor")
    if softmax_lse.dtype != torch.float32:
        raise TypeError(f"softmax_lse has dtype {softmax_lse.dtype}; it must be torch.float32")
    shape = tuple(q.shape[:3])
    if tuple(softmax_lse.shape) not in (shape, (q.shape[0] * q.shape[1] * q.shape[2],)):
        raise ValueError(f"softmax_lse has shape {tuple(softmax_lse.shape)}; it must be {shape}, or flat with as many elements")
    if softmax_lse.device != q.device:
        raise ValueError(f"softmax_lse is on {softmax_lse.device} and Q on {q.device}; they must be on the same device")
    if not softmax_lse.is_contiguous():
        raise ValueError(f"softmax_lse has strides {softmax_lse.stride()}; it must be contiguous")
    if softmax_lse.requires_grad:
        raise ValueError("softmax_lse requires gradients; it is overwritten, so it must not")
    return softmax_lse.view(shape)
