"""``attn_mask`` of ``scaled_dot_product_attention``: calls with it by our kernels, where they take it."""

from __future__ import annotations

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.modes_spec import ModeNames, ModesSpec
from flashmoe_science.ops.attention.call.spec import Unserved
from flashmoe_science.ops.attention.front.as_pytorch import TORCH_NAMES
from flashmoe_science.ops.attention.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.attention.front.known_calls import ALL_KEYS, NO_APPEND, first_launch, launch_known
from flashmoe_science.ops.attention.front.modes_calls import decide_modes, takes_modes
from flashmoe_science.ops.attention.front.modes_op import attend_with
from flashmoe_science.ops.attention.problem.features import Extras
from flashmoe_science.ops.plan import NO_BACKWARD, is_plain

_OTHERS = ModeNames(bias="attn_mask")
_NO_WINDOW = (-1, -1)


def masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None,
) -> torch.Tensor | None:
    """The call with a mask by our kernel; None where PyTorch's own function serves it, or refuses it.

    Raises:
        CannotServe: ``kernel`` is one that takes modes, and cannot serve the call.
        TypeError, ValueError: what else ``attend_modes`` refuses.
    """
    tensors, known = (query, key, value, *(None,) * 8, attn_mask, None, None, *NO_APPEND), None
    if not (torch.compiler.is_compiling() or is_causal):
        found, known = launch_known(tensors, ALL_KEYS, _NO_WINDOW, scale, ("attn_mask", enable_gqa, kernel))
        if found is not None:
            return found[0]
    if kernel is not None and not takes_modes(kernel):
        return None
    extras = _mask_extras(query, key, value, attn_mask, is_causal, enable_gqa)
    if isinstance(extras, str):
        if kernel is not None:
            raise CannotServe(f"kernel {kernel!r} cannot serve this call: {extras}; {PYTORCH!r} can")
        return None
    spec = ModesSpec("full", kernel=kernel, names=TORCH_NAMES, others=_OTHERS)
    try:
        if known is not None:
            found = first_launch(known, tensors, ALL_KEYS, (query, key, value), extras, spec, scale, None, tokens_first=False)
            if found is not None:
                return found[0]
        plain = not torch.compiler.is_compiling() and is_plain(query, key, value)
        if plain and decide_modes(query, key, value, extras, spec).kernel == PYTORCH:
            return None
        return attend_with(query, key, value, extras, spec, scale)[0]
    except Unserved:
        if kernel is not None:
            raise
        return None


def explain_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    is_causal: bool,
    enable_gqa: bool,
    kernel: str | None,
) -> Decision | str:
    """What ``masked`` is served by; where it gives None, why not by our kernel. Raises as ``masked``."""
    extras = _mask_extras(query, key, value, attn_mask, is_causal, enable_gqa)
    if isinstance(extras, str) or (kernel is not None and not takes_modes(kernel)):
        return extras if isinstance(extras, str) else "asked for by name"
    try:
        decision = decide_modes(query, key, value, extras, ModesSpec("full", kernel=kernel, names=TORCH_NAMES, others=_OTHERS))
    except Unserved as refusal:
        if kernel is not None:
            raise
        return f"attn_mask is given, and no kernel of ours takes the input: {refusal}"
    return decision if decision.kernel != PYTORCH else f"attn_mask is given: {decision.reason}"


def _is_on_nvidia(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None


def _mask_extras(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, is_causal: bool, enable_gqa: bool
) -> Extras | str:
    """The mask as Extras, broadcast; or why no kernel of ours takes it."""
    tensors = (query, key, value, attn_mask)
    if is_causal:
        return "attn_mask and is_causal are given, which no kernel of ours takes together"
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        return "attn_mask is given, and an argument is not a tensor"
    if not (_is_on_nvidia(query) and all(one.dim() == 4 for one in tensors[:3])):
        return "attn_mask is given, which no kernel of ours takes but with 4-D tensors on an NVIDIA GPU"
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return f"attn_mask is given; {NO_BACKWARD}"
    if attn_mask.device != query.device or attn_mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {attn_mask.dtype} on {attn_mask.device}, which no kernel of ours takes"
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return "attn_mask is given, and key has another number of heads than query"
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if not 2 <= attn_mask.dim() <= 4 or any(
        size not in (1, whole) for size, whole in zip(reversed(attn_mask.shape), reversed(full), strict=False)
    ):
        return f"attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {full}"
    return Extras(bias=attn_mask.expand(full))
