"""The router of a mixture of experts: which experts a token goes to and with which weights; and how evenly they are loaded.

On CUDA one kernel launch (``triton.py``). Where a derivative may be asked for, on a CPU and for what the kernel does not
take, PyTorch's operators compute the same. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.moe.route.spec import (
    BoundRoute,
    Normalize,
    Options,
    Routed,
    Scoring,
    Tensors,
    check_ids,
    check_logits,
    checked_options,
)
from flashmoe_science.ops.plan import MOST_CALLS, Cache, alignment, could_be_known, guards_of, is_plain


class CachedLaunch(NamedTuple):
    """A bound call, and when it serves another: tensors that match, and whose ``alignment`` is equal."""

    matches: Callable[..., bool]
    alignment: Hashable
    call: BoundRoute


_CALLS: Cache[Hashable, tuple[CachedLaunch, ...]] = Cache(MOST_CALLS)
_MAX_VARIANTS = 4  # calls of one key, which differ in strides, dtypes or devices


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    normalize: Normalize = "none",
    selection_bias: torch.Tensor | None = None,
    groups: int = 1,
    top_k_groups: int | None = None,
    scaling_factor: float = 1.0,
) -> Routed:
    """The ``top_k`` best experts of each token, the best first, and their weights. All is computed in fp32.

    Without a bias experts are compared by their logits, exactly, as each scoring rises with the logit. Of equal scores the
    lowest index comes first, of groups too; -0.0 equals 0.0; NaN comes after -inf, and no expert is chosen twice.

    Args:
        router_logits: [..., experts] in fp32, bf16 or fp16; there may be no token.
        top_k: how many experts a token goes to.
        scoring: "softmax" over all experts (Mixtral, Qwen3, OLMoE), "softmax_topk" over the chosen (gpt-oss) or "sigmoid"
            (DeepSeek-V3, GLM-4.5, Kimi-K2).
        normalize: "sum" divides the weights of a token by their sum, plus 1e-20.
        selection_bias: [experts] fp32, added to the sigmoids for choosing only; no gradient flows to it. For "sigmoid".
        groups: above 1, a token goes to experts of its ``top_k_groups`` best groups only. The score of a group, experts that
            follow each other, is the sum of its two best. For "sigmoid".
        top_k_groups: how many groups are kept; needed where there are groups.
        scaling_factor: what the weights are multiplied by at last.

    Returns:
        top_k_weights [..., top_k] fp32 and top_k_ids [..., top_k] int32.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    options = (top_k, scoring, normalize, groups, top_k_groups, scaling_factor)
    if not torch.compiler.is_compiling():
        key, call = _cached(router_logits, selection_bias, options)
        if call is not None:
            return call(router_logits, selection_bias)
        other = router_logits if selection_bias is None else selection_bias
        if is_plain(router_logits, router_logits, other):
            return _bound(router_logits, selection_bias, options, key)(router_logits, selection_bias)
    checked = checked_options(router_logits, selection_bias, *options)
    if _is_differentiated(router_logits):
        return route_by_pytorch(router_logits, selection_bias, checked)
    bias = None if selection_bias is None else selection_bias.detach()  # often a parameter, though no gradient flows to it
    routed: Routed = _moe_route(router_logits, bias, *checked)
    return routed


def bind_route(like: Tensors, options: Options) -> BoundRoute:
    """``route`` for tensors like these, of options that are allowed: it only allocates the results and launches."""
    logits = like.router_logits
    differentiated = logits.requires_grad and torch.is_grad_enabled()
    served = logits.is_cuda and not differentiated and torch.version.cuda is not None and TRITON_MISSING is None
    if not served or torch.cuda.get_device_capability(logits.device) < (8, 0) or _kernel().cannot(options, logits.shape[-1]):
        return lambda logits, bias: route_by_pytorch(logits, bias, options)
    bound: BoundRoute = _kernel().bind(like, options)
    return bound


def _is_differentiated(logits: torch.Tensor) -> bool:
    """Whether autograd, forward or backward, or a transform of torch.func has a part in the call."""
    if logits.requires_grad and torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _cached(logits: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...]) -> tuple[Hashable, BoundRoute | None]:
    """The key of a call, and what serves it, None where it is new or is no plain eager call."""
    given = (logits,) if bias is None else (logits, bias)
    try:
        # The types too: True and 1 are equal.
        key = (logits.shape, options, *map(type, options), bias is None, torch.is_grad_enabled())
        cached = _CALLS.get(key)
        if cached is None or not could_be_known(given):
            return key, None
    except (RuntimeError, TypeError, AttributeError):  # no tensor, a nested one, an option of a wrong type perhaps no hash
        checked_options(logits, bias, *options)
        raise
    for matches, aligned, call in cached:
        if matches(*given) and aligned == alignment(given):
            return key, call
    return key, None


def _bound(logits: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...], key: Hashable) -> BoundRoute:
    """The call of such tensors, which is cached from now on. Raises as ``route``."""
    checked = checked_options(logits, bias, *options)
    given = (logits,) if bias is None else (logits, bias)
    cached = CachedLaunch(guards_of(given), alignment(given), bind_route(Tensors(logits, bias), checked))
    _CALLS[key] = (cached, *_CALLS.get(key, ())[: _MAX_VARIANTS - 1])
    return cached.call


@cache
def _kernel() -> ModuleType:
    """The module of the kernel, which brings Triton: an import of this one need not wait for it."""
    from flashmoe_science.ops.moe.route import triton as route_triton

    return route_triton


@torch.library.custom_op("flashmoe::moe_route", mutates_args=())
def _moe_route(
    router_logits: torch.Tensor,
    selection_bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    normalize: str,
    groups: int,
    top_k_groups: int,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.compile, export and modes see of ``route``; its arguments are checked."""
    groups_kept = top_k_groups if groups > 1 else None
    options = (top_k, scoring, normalize, groups, groups_kept, scaling_factor)
    key, call = _cached(router_logits, selection_bias, options)
    call = call or _bound(router_logits, selection_bias, options, key)
    return call(router_logits, selection_bias)


@_moe_route.register_fake
def _fake(router_logits: torch.Tensor, selection_bias: torch.Tensor | None, top_k: int, *options: Any) -> Routed:
    shape = (*router_logits.shape[:-1], top_k)
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


# By PyTorch's operators ------------------------------------------------------------------------------------------------------


def route_by_pytorch(logits: torch.Tensor, bias: torch.Tensor | None, options: Options) -> Routed:
    """``route`` of checked arguments by PyTorch's own operators, differentiable through the weights."""
    x = logits.float().contiguous()
    scores = (
        x if options.scoring == "softmax_topk" else torch.sigmoid(x) if options.scoring == "sigmoid" else torch.softmax(x, -1)
    )
    keys = _keys((x if bias is None else scores + bias).detach())
    if options.groups > 1:
        keys = _keys_of_best_groups(keys, (scores if bias is None else scores + bias).detach(), options)
    ids = _descending(keys)[..., : options.top_k]
    weights = scores.gather(-1, ids)
    if options.scoring == "softmax_topk":
        weights = torch.softmax(weights, -1)
    if options.normalize == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * options.scaling_factor, ids.int()


def _keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 in the order of the fp32 scores; the zeros are one, NaN comes last, and -2**31 is below all."""
    bits = scores.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    return torch.where(scores.isnan(), 1 - 2**31, torch.where(bits < 0, -magnitude, magnitude))


def _descending(keys: torch.Tensor) -> torch.Tensor:
    """Indices of the keys from the largest to the smallest, of equals the lowest first, which torch.topk does not promise."""
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices


def _keys_of_best_groups(keys: torch.Tensor, scores: torch.Tensor, options: Options) -> torch.Tensor:
    """The keys, -2**31 outside of the groups of the largest sums of their two best scores."""
    grouped = keys.unflatten(-1, (options.groups, -1))
    best_two = _descending(grouped)[..., :2]
    sums = scores.unflatten(-1, (options.groups, -1)).gather(-1, best_two).sum(-1)
    kept = _descending(_keys(sums))[..., : options.top_k_groups]
    is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, kept, True)
    return torch.where(is_kept[..., None], grouped, -(2**31)).flatten(-2)


def balance_loss(router_logits: torch.Tensor, top_k_ids: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss that evens out the experts' load: top_k where it is even, more where it is not.

    experts * sum over experts of (assignments a token) * (mean softmax), as ``load_balancing_loss_func`` of transformers
    without a mask. Differentiable in ``router_logits`` ([..., experts]); 0 where there is no token.
    """
    experts = check_logits(router_logits)
    check_ids(top_k_ids, experts, router_logits)
    probabilities = torch.softmax(router_logits.float(), -1).reshape(-1, experts)
    tokens = max(probabilities.shape[0], 1)
    return experts * (expert_load(top_k_ids, experts) / tokens * (probabilities.sum(0) / tokens)).sum()


def expert_load(top_k_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """How many (token, expert) pairs each of the experts has.

    Args:
        top_k_ids: [..., top_k], int32 or int64; ids outside of 0 to experts - 1 are not counted.

    Returns:
        [experts] int32.
    """
    check_ids(top_k_ids, experts)
    ids = top_k_ids.reshape(-1).long()
    bins = torch.where((ids >= 0) & (ids < experts), ids, experts)
    # torch.bincount would wait for the device to size its result.
    return ids.new_zeros(experts + 1, dtype=torch.int32).scatter_add(0, bins, torch.ones_like(bins, dtype=torch.int32))[:-1]
