"""``scaled_dot_product_attention`` beyond plain calls: masks, and PyTorch's own function."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.checks import (
    Unsupported,
    check_dropout,
    check_mask_argument,
    check_tensors,
    checked_scale,
)
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, ArgNames, Options, Tensors
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.front.operator import attend, cached_call, decide
from flashmoe_science.ops.calls import autocast, is_plain, needs_grad
from flashmoe_science.ops.choose import GRADIENTS
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.ops.private import of_no_memory

TORCH_NAMES = ArgNames(q="query", k="key", v="value", scale="scale", bias="attn_mask")


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
) -> torch.Tensor | str:
    """The masked call's result by our kernel; if PyTorch's own function serves or refuses it instead, the reason, in words.
    Raises CannotServe: ``kernel`` is ours and cannot serve the call. Raises TypeError, ValueError: what else ``attend``
    refuses."""
    store = None
    if not (torch.compiler.is_compiling() or is_causal):
        given = (query, key, value, *(None,) * 8, attn_mask, *(None,) * 8)
        found, store = cached_call(given, ALL_KEYS, ("attn_mask", enable_gqa, kernel), scale)
        if found is not None:
            return found[0]
    if kernel == PYTORCH:
        return "asked for by name"
    if (cast := autocast((query, key, value, attn_mask))) is not None:
        (query, key, value, attn_mask), store = cast, None
    bias = _bias((query, key, value, attn_mask), is_causal, enable_gqa, kernel)
    if isinstance(bias, str):
        if kernel is not None:
            raise CannotServe(f"kernel {kernel!r} cannot serve this call: {bias}; {PYTORCH!r} can")
        return bias
    tensors, options = Tensors(query, key, value, bias=bias), Options(kernel=kernel, names=TORCH_NAMES)
    try:
        if not torch.compiler.is_compiling() and (is_plain(query, key, value) or is_explaining()):
            decision = decide(tensors, options, scale)
            if decision.kernel == PYTORCH:
                return f"attn_mask is given: {decision.reason}"
        return attend(tensors, options, scale, store=store)[0]
    except Unsupported as refusal:
        if kernel is not None:
            raise
        return f"attn_mask is given, and no kernel of ours takes the input: {refusal}"


def _is_on_nvidia(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None


def _bias(tensors: tuple[torch.Tensor, ...], is_causal: bool, enable_gqa: bool, kernel: str | None) -> torch.Tensor | str:
    """The mask, the last of ``tensors``, broadcast to [batch, heads, seqlen_q, seqlen_k]; or why no kernel of ours takes it."""
    query, key, _, attn_mask = tensors
    if is_causal:
        return "attn_mask and is_causal are given, which no kernel of ours takes together"
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        return "attn_mask is given, and an argument is not a tensor"
    if not (_is_on_nvidia(query) and all(one.dim() == 4 for one in tensors[:3])):
        return "attn_mask is given, which no kernel of ours takes but with 4-D tensors on an NVIDIA GPU"
    asked = kernel is not None or torch.are_deterministic_algorithms_enabled()
    if needs_grad(*tensors) and torch.compiler.is_compiling() and not asked:
        return f"attn_mask is given, and {GRADIENTS}"
    if attn_mask.device != query.device or attn_mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {attn_mask.dtype} on {attn_mask.device}, which no kernel of ours takes"
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return "attn_mask is given, and key has another number of heads than query"
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if not 2 <= attn_mask.dim() <= 4 or any(
        size not in (1, whole) for size, whole in zip(reversed(attn_mask.shape), reversed(full), strict=False)
    ):
        return f"attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {full}"
    return attn_mask.expand(full)


class TorchCall(NamedTuple):
    """The arguments of PyTorch's function, and the kernel asked for."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    kernel: str | None


def by_pytorch(call: TorchCall, why: Unsupported | str) -> torch.Tensor:
    """PyTorch's own function. What it refuses is refused in our words, if they say what is wrong. ``why``: why no kernel of
    ours serves the call, as words or as the refusal; "" for dropout."""
    refusal = why if isinstance(why, Unsupported) else None
    if not is_explaining():
        return _by_pytorch(call, refusal)
    context, empty = of_no_memory()
    with context:  # refuses what the call would, and computes nothing
        tensors = (empty(one) if isinstance(one, torch.Tensor) else one for one in call[:4])
        _by_pytorch(TorchCall(*tensors, *call[4:]), refusal)  # type: ignore[arg-type, call-arg]
    reason = f"no kernel of ours takes the input: {refusal}" if refusal is not None else str(why)
    reason = reason or f"dropout_p is {call.dropout_p}, which no kernel of ours takes yet"
    raise Explained(Decision(PYTORCH, Config(), reason, "required"))


def _by_pytorch(call: TorchCall, refusal: Unsupported | None) -> torch.Tensor:
    if call.kernel is not None:
        _check_kernel(call.kernel, call.attn_mask, call.dropout_p, refusal)
    scale = checked_scale(call.scale, "scale")
    try:
        return F.scaled_dot_product_attention(*call[:6], scale=scale, enable_gqa=call.enable_gqa)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if refusal is not None:
            raise refusal from error
        check_tensors(*call[:3], TORCH_NAMES)
        if call.attn_mask is not None:
            check_mask_argument(call.attn_mask, call.query, call.key, TORCH_NAMES)
        check_dropout(call.dropout_p)
        if call.attn_mask is not None and "is_causal" in str(error):
            both = f"attn_mask is given and is_causal is True; for PyTorch {torch.__version__} they must not be given together"
            raise ValueError(both) from error
        raise


def _check_kernel(kernel: str, attn_mask: torch.Tensor | None, dropout_p: float, refusal: Unsupported | None) -> None:
    from flashmoe_science.operations import kernel_named  # it brings Triton: not at import

    if kernel_named(kernel).name == PYTORCH:
        return
    if refusal is not None:
        raise refusal
    argument = "dropout_p" if attn_mask is None or dropout_p != 0.0 else "attn_mask"
    raise CannotServe(f"kernel {kernel!r} takes no {argument}; {PYTORCH!r} does")
