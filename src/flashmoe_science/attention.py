"""The public attention functions: PyTorch's signature, FlashAttention's, and the two of this project's own documents.

All compute exact attention, softmax(Q K^T * scale + mask) V, in fp16, bf16 or fp32, with head dimensions 1 to 256. They
differ in layout and in where the causal mask is aligned when Q and K have different lengths. PyTorch's own attention serves
tensors on the CPU, fp64, dropout and wider heads. Under torch.autocast inputs are cast as PyTorch casts them for its own
attention. ``explain`` returns what serves a call, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.ops.attention.call.checks import Unsupported, check_tensors
from flashmoe_science.ops.attention.call.tensors import ArgNames, Given, Options, Tensors
from flashmoe_science.ops.attention.front.flash import FLASH_NAMES, check_dimensions, checked_cap, slopes_of, window_of
from flashmoe_science.ops.attention.front.merge.checks import parts_of
from flashmoe_science.ops.attention.front.merge.choose import merge
from flashmoe_science.ops.attention.front.operator import attend, attend_with_dropout
from flashmoe_science.ops.attention.front.sdpa import TORCH_NAMES, TorchCall, by_pytorch, masked
from flashmoe_science.ops.checks import check_device, check_flag, check_kernel, checked_tensor
from flashmoe_science.ops.explain import explained

_DOCUMENT_NAMES = ArgNames(q="Q", k="K", v="V")
# Options of FlashAttention's signature, by (causal, whether the log-sum-exp is asked for).
_FLASH = {
    (causal, lse): Options("causal" if causal else "full", lse, tokens_first=True, names=FLASH_NAMES)
    for causal in (False, True)
    for lse in (False, True)
}
# Options of PyTorch's signature where no kernel is asked for, by (is_causal, enable_gqa).
_TORCH = {
    (causal, gqa): Options("causal-topleft" if causal else "full", gqa=gqa, allow_empty=False, names=TORCH_NAMES)
    for causal in (False, True)
    for gqa in (False, True)
}
_DOCUMENT = {causal: Options("causal" if causal else "full", names=FLASH_NAMES) for causal in (False, True)}
_DOCUMENT_LSE = {causal: Options("causal" if causal else "full", True, names=_DOCUMENT_NAMES) for causal in (False, True)}


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
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
        attn_mask: boolean (True takes part) or of the query's dtype (added), broadcastable to [batch, heads, seqlen_q,
            seqlen_k]. A row that sees no key gets zeros. Our kernel serves it on an NVIDIA GPU if no gradient is needed,
            ``is_causal`` is not set and the dtype is bool or the query's; else PyTorch's does.
        dropout_p: above 0, served by PyTorch's own attention.
        is_causal: query i sees keys 0 to i (aligned top-left, as in PyTorch).
        scale: of the scores; head_dim ** -0.5 by default.
        enable_gqa: let heads_kv be a divisor of heads.
        kernel: serve by this kernel (``flashmoe explain`` names them) or raise; by default the best for the problem.

    PyTorch's function also serves what else it takes (3-D or 5-D, fp64, a batch of 1 that broadcasts, sizes of 0, head
    dimensions above 256, a last dimension that is not contiguous).

    Returns:
        [batch, heads, seqlen_q, head_dim_v] in the dtype and the memory order of ``query``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, or a ``kernel`` that cannot serve the call, in one line.
    """
    options = _torch_options(is_causal, enable_gqa, kernel)
    why: Unsupported | str = ""
    if dropout_p == 0.0:
        if attn_mask is None:
            try:
                return attend((query, key, value), options, scale)[0]
            except Unsupported as refusal:
                why = refusal
        else:
            out = masked(query, key, value, attn_mask, is_causal, scale, enable_gqa, kernel)
            if not isinstance(out, str):
                return out
            why = out
    return by_pytorch(TorchCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel), why)


def explain(*arguments: Any, **options: Any) -> Decision:
    """The kernel that serves a call, and why: ``explain(flash_attn_varlen_func, q, k, v, ...)``. Compiles the kernel, launches
    nothing.

    Args:
        arguments, options: a function of this package, then the call's arguments; without a function,
            ``scaled_dot_product_attention``. If the function calls ours several times, the first call is explained.

    Raises:
        TypeError, ValueError, NotImplementedError: what the call itself would raise, except for values of lengths and pages.
    """
    if arguments and callable(arguments[0]):
        return explained(arguments[0], arguments[1:], options)
    return explained(scaled_dot_product_attention, arguments, options)


def _torch_options(is_causal: bool, enable_gqa: bool, kernel: str | None) -> Options:
    if is_causal is not False:
        check_flag(is_causal, "is_causal")
    if enable_gqa is not False:
        check_flag(enable_gqa, "enable_gqa")
    if kernel is None:
        return _TORCH[is_causal, enable_gqa]
    check_kernel(kernel)
    return _named_options(is_causal, enable_gqa, kernel)


@lru_cache(maxsize=64)
def _named_options(is_causal: bool, enable_gqa: bool, kernel: str) -> Options:
    return _TORCH[is_causal, enable_gqa]._replace(kernel=kernel)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attention with the signature and the semantics of FlashAttention 2's ``flash_attn_func``.

    Args:
        q: [batch, seqlen_q, heads, head_dim].
        k, v: [batch, seqlen_k, heads_kv, head_dim] (v may have another head_dim); heads_kv divides heads.
        softmax_scale: of the scores; head_dim ** -0.5 by default.
        causal: the last query sees the last key (aligned bottom-right); a query that sees no key gets zeros.
        return_attn_probs: also return the log-sum-exp, and with ``dropout_p`` the weights (for tests).
        window_size: query i sees keys i + seqlen_k - seqlen_q - left to ... + right, both included; -1 for no limit.
        softcap: scores s become softcap * tanh(s / softcap); 0.0 for none.
        alibi_slopes: fp32 [heads] or [batch, heads]: adds -slope * |i + seqlen_k - seqlen_q - j| to the scores.
        kernel: serve by this kernel or raise; by default the best for the problem.
        dropout_p: above 0, served by PyTorch's operators; the log-sum-exp is that without dropout.
        deterministic: equal calls give equal bits in the gradients too, by our backward; else the call is refused.

    Returns:
        out [batch, seqlen_q, heads, head_dim_v]; with ``return_attn_probs`` (out, lse [batch, heads, seqlen_q] in fp32
        or, for fp64, in fp64, weights): with ``dropout_p`` the softmax [batch, heads, seqlen_q, seqlen_k] in q's dtype,
        negative where dropped, else None.

    Raises:
        TypeError, ValueError: an argument that is not allowed, or a ``kernel`` that cannot serve the call, in one line.
    """
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)) or not (
        q.dim() == k.dim() == v.dim() == 4
    ):
        check_tensors(q, k, v, FLASH_NAMES)
    check_flag(causal, "causal")
    check_flag(return_attn_probs, "return_attn_probs")
    views = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    tensors: Given = views
    options = _FLASH[causal, return_attn_probs]
    if kernel is not None:
        check_kernel(kernel)
        options = options._replace(kernel=kernel)
    if deterministic is not False:
        check_flag(deterministic, "deterministic")
        options = options._replace(deterministic=True)
    if not (type(window_size) is tuple and window_size == (-1, -1) and softcap == 0.0 and alibi_slopes is None):
        left, right = window_of(window_size, causal)
        options = options._replace(window_left=left, window_right=right, softcap=checked_cap(softcap))
        if alibi_slopes is not None:
            tensors = Tensors(*views, alibi_slopes=slopes_of(alibi_slopes, q.shape[0]))
    weights = None
    if dropout_p != 0.0:
        out, lse, weights = attend_with_dropout(tensors, options, softmax_scale, dropout_p)
    else:
        out, lse = attend(tensors, options, softmax_scale)
    return (out, lse, weights) if lse is not None else out


def merge_attention(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention to parts of the keys into attention to all keys; differentiable.

    On an NVIDIA GPU one launch reads each part once, where it lies. PyTorch's operators serve calls that need gradients or are
    compiled, fp64, more than 32 parts, heads of more than 512, and parts that differ in strides.

    Args:
        outs: of each part [..., tokens, heads, head_dim], as ``flash_attn_func``, ``flash_attn_varlen_func`` and
            ``flash_attn_with_kvcache`` return it; or one tensor of all, parts first.
        lses: of each part [..., heads, tokens], the log-sum-exp that they return, or fp64. A row with -inf is not read.

    Returns:
        (out, lse), each in the shape and dtype of a part's; zeros and -inf where no part has a key, and no gradient.

    Raises:
        TypeError, ValueError: parts that do not fit each other.
    """
    return merge(parts_of("outs", outs), parts_of("lses", lses))


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
    return attend((q, k, v), _DOCUMENT[causal], softmax_scale)[0]


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
        softmax_lse: fp32, contiguous, [batch, heads, seqlen_q] or flat with as many elements: overwritten with each row's
            log-sum-exp (natural), -inf where a query sees no key.

    Returns:
        [batch, heads, seqlen_q, head_dim_v] in the dtype and the memory order of ``Q``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    check_dimensions((("Q", Q),), (("batch, heads, sequence, head_dim", 4),))
    lse = _lse_view(softmax_lse, Q)
    check_flag(causal, "causal")
    if torch.compiler.is_compiling() or lse.data_ptr() % 16 == 0:
        return attend((Q, K, V), _DOCUMENT_LSE[causal], softmax_scale, lse)[0]
    out, aligned = attend((Q, K, V), _DOCUMENT_LSE[causal], softmax_scale)
    assert aligned is not None
    lse.copy_(aligned)
    return out


def _lse_view(softmax_lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``softmax_lse`` as [batch, heads, seqlen_q]. Raises TypeError: not an fp32 tensor. Raises ValueError: another shape or
    device, not contiguous, or in need of gradients."""
    checked_tensor("softmax_lse", softmax_lse)
    if softmax_lse.dtype != torch.float32:
        raise TypeError(f"softmax_lse has dtype {softmax_lse.dtype}; it must be torch.float32")
    shape, flat = tuple(q.shape[:3]), (q.shape[0] * q.shape[1] * q.shape[2],)
    if softmax_lse.shape != shape and softmax_lse.shape != flat:  # what torch.compile traces, not "in"
        raise ValueError(f"softmax_lse has shape {tuple(softmax_lse.shape)}; it must be {shape}, or flat with as many elements")
    check_device("softmax_lse", softmax_lse, "Q", q)
    if not softmax_lse.is_contiguous():
        raise ValueError(f"softmax_lse has strides {softmax_lse.stride()}; it must be contiguous")
    if softmax_lse.requires_grad:
        raise ValueError("softmax_lse requires gradients; it is overwritten, so it must not")
    return softmax_lse.view(shape)
