"""The router of a mixture of experts: which experts a token goes to and with which weights.

On CUDA it is one launch (``triton.py``); PyTorch's operators compute the same on a CPU and for what the kernel does not take.
Gradients flow through the chosen experts' weights (``backward.py``). Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import Config
from flashmoe_science.ops.calls import find_launch, guards_of, is_plain, is_transformed, needs_grad, store_launch
from flashmoe_science.ops.choose import GRADIENTS
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.ops.moe.route.backward import differentiable, launched
from flashmoe_science.ops.moe.route.choose import kernels, why_pytorch
from flashmoe_science.ops.moe.route.losses import balance_loss, router_sums, z_loss
from flashmoe_science.ops.moe.route.spec import Normalize, Options, Routed, RouteLaunch, Scoring, Tensors, checked_options
from flashmoe_science.ops.operator import register

Bind = Callable[[Tensors, Options], Callable[..., Any]]  # checked arguments to what only launches


def route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    normalize: Normalize = "none",
    selection_bias: torch.Tensor | None = None,
    groups: int = 1,
    top_k_groups: int | None = None,
    scaling_factor: float = 1,
) -> Routed:
    """The ``top_k`` best experts of each token, the best first, and their weights. All is computed in fp32, in fp64 for fp64.

    Without a bias experts are compared by their logits, exactly, as each scoring rises with the logit. Among equal scores, of
    groups too, the lowest index comes first; -0.0 equals 0.0; NaN comes after -inf, and no expert is chosen twice.

    Args:
        router_logits: [..., experts] in fp32, bf16, fp16 or fp64, also of no tokens.
        top_k: how many experts a token goes to.
        scoring: "softmax" over all experts (Mixtral, Qwen3, OLMoE), "softmax_topk" over the chosen (gpt-oss) or "sigmoid"
            (DeepSeek-V3, GLM-4.5, Kimi-K2).
        normalize: "sum" divides the weights of a token by their sum, plus 1e-20.
        selection_bias: [experts] fp32, added to the sigmoids only for choosing; no gradient flows to it. For "sigmoid".
        groups: above 1, a token goes only to experts of its ``top_k_groups`` best groups. A group is consecutive experts; its
            score is the sum of its two best. For "sigmoid".
        top_k_groups: how many groups are kept; needed if there are groups.
        scaling_factor: multiplies the weights at the end.

    Returns:
        top_k_weights [..., top_k] fp32 (fp64 for fp64) and top_k_ids [..., top_k] int32.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    options = (top_k, scoring, normalize, groups, top_k_groups, scaling_factor)
    ways = bind_route, _OPERATOR, route_by_pytorch
    routed: Routed = _called(*ways, router_logits, selection_bias, options)
    return routed


def _called(
    bind: Bind, operator: Any, by_pytorch: Any, logits: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...]
) -> Any:
    """A call with unchecked arguments: by the stored launch of ``bind``, by a new one, through the operator if something must
    see it, or by PyTorch's operators within a transform of torch.func."""
    if not torch.compiler.is_compiling():
        launch, key = _find(bind, logits, bias, options)
        if launch is not None:
            return launch(logits, bias)
        if is_plain(logits, bias):
            return _serve(bind, logits, bias, options, key)
    checked = checked_options(logits, bias, *options)
    if is_explaining():
        raise Explained(_decide(Tensors(logits, bias), checked))
    if not torch.compiler.is_compiling() and is_transformed():
        return by_pytorch(logits, bias, checked)
    # The bias is often a parameter, though no gradient flows to it.
    return operator(logits, None if bias is None else bias.detach(), *checked)


def bind_route(like: Tensors, options: Options) -> RouteLaunch:
    """``route`` for tensors like these and checked options: it only allocates the results and launches."""
    if needs_grad(like.router_logits):
        return _trained(bind_route, like, options)
    if why_pytorch(like.router_logits, options) is not None:
        return lambda logits, bias: route_by_pytorch(logits, bias, options)
    bound: RouteLaunch = kernels().bind(like, options)
    return bound


def _trained(bind: Bind, like: Tensors, options: Options) -> Callable[..., Any]:
    """What ``bind`` binds, as part of PyTorch's graph."""
    with torch.no_grad():
        forward = bind(like, options)
    return lambda logits, bias: launched(forward, options, logits, None if bias is None else bias.detach())


def _decide(like: Tensors, options: Options) -> Decision:
    why = why_pytorch(like.router_logits, options)
    backward = "one kernel too" if why is None else "PyTorch's operators"
    more = f"; {GRADIENTS}, its backward by {backward}" if needs_grad(like.router_logits) else ""
    if why is None:
        kernels().bind(like, options)
        return Decision("moe_route_triton", Config(), f"the router has one kernel{more}", "modelled")
    return Decision("pytorch", Config(), f"{why}{more}", "required")


def _find(
    bind: Bind, logits: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...]
) -> tuple[Callable[..., Any] | None, Hashable]:
    """The stored launch of a call, and its key; None for both where an argument is no tensor, or has no hash."""
    given = (logits,) if bias is None else (logits, bias)
    try:
        # The types too: True and 1 are equal.
        kinds = (options, *map(type, options), torch.is_grad_enabled())
        key = (bind, logits.shape, kinds, bias is None)
        return find_launch(key, given), key
    except (AttributeError, RuntimeError, TypeError):  # no tensor, a nested one, an option that has no hash
        return None, None


def _serve(bind: Bind, logits: torch.Tensor, bias: torch.Tensor | None, options: tuple[Any, ...], key: Hashable) -> Any:
    """Check a new call, bind it and store its launch. Raises as ``route``."""
    launch = bind(Tensors(logits, bias), checked_options(logits, bias, *options))
    if key is not None:
        store_launch(key, guards_of((logits,) if bias is None else (logits, bias), aligned=True), launch)
    return launch(logits, bias)


def _forward(bind: Bind, logits: torch.Tensor, bias: torch.Tensor | None, *checked: Any) -> Any:
    top_k, scoring, normalize, groups, top_k_groups, scaling_factor = checked
    options = (top_k, scoring, normalize, groups, top_k_groups if groups > 1 else None, scaling_factor)
    launch, key = _find(bind, logits, bias, options)
    return _serve(bind, logits, bias, options, key) if launch is None else launch(logits, bias)


def _fake(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *options: Any) -> Routed:
    shape = (*logits.shape[:-1], top_k)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int32)


_ARGUMENTS = (
    "Tensor router_logits, Tensor? selection_bias, int top_k, str scoring, str normalize, int groups, int top_k_groups, "
    "float scaling_factor"
)
# What torch.compile, export and modes see of ``route``; its arguments are checked.
_OPERATOR = register(
    f"moe_route({_ARGUMENTS}) -> (Tensor, Tensor)",
    partial(_forward, bind_route),
    _fake,
    partial(differentiable, "moe_route"),
)


# With the router's losses ----------------------------------------------------------------------------------------------------


def route_with_losses(
    router_logits: torch.Tensor, selection_bias: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``route``'s weights and ids, ``balance_loss`` and ``z_loss``: on CUDA two launches more, and none more in the backward.
    ``options``: as ``options_of`` takes them."""
    ways = _bind_with_losses, _WITH_LOSSES, _losses_by_pytorch
    weights, ids, balance, z, *_ = _called(*ways, router_logits, selection_bias, options)
    return weights, ids, balance, z


def _bind_with_losses(like: Tensors, options: Options) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``route_with_losses`` as ``bind_route`` binds, with the load of the experts behind."""
    if needs_grad(like.router_logits):
        return _trained(_bind_with_losses, like, options)
    route = bind_route(like, options)

    def launch(logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        weights, ids = route(logits, bias)
        return weights, ids, *router_sums(logits, ids)

    return launch


def _losses_by_pytorch(logits: torch.Tensor, bias: torch.Tensor | None, options: Options) -> tuple[torch.Tensor, ...]:
    weights, ids = route_by_pytorch(logits, bias, options)
    return weights, ids, balance_loss(logits, ids), z_loss(logits)


def _fake_with_losses(logits: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> tuple[torch.Tensor, ...]:
    weights, ids = _fake(logits, bias, *options)
    return weights, ids, weights.new_empty(()), weights.new_empty(()), ids.new_empty(logits.shape[-1])


_WITH_LOSSES = register(
    f"moe_route_with_losses({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    partial(_forward, _bind_with_losses),
    _fake_with_losses,
    partial(differentiable, "moe_route_with_losses"),
)


# By PyTorch's operators ------------------------------------------------------------------------------------------------------


def route_by_pytorch(logits: torch.Tensor, bias: torch.Tensor | None, options: Options) -> Routed:
    """``route`` of checked arguments by PyTorch's own operators, differentiable through the weights."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
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
    """Integers as wide as the scores, in their order; both zeros are equal, NaN comes last, the least integer is below all."""
    bits = scores.view(torch.int32 if scores.dtype == torch.float32 else torch.int64)
    limits = torch.iinfo(bits.dtype)
    magnitude = bits & limits.max
    return torch.where(scores.isnan(), limits.min + 1, torch.where(bits < 0, -magnitude, magnitude))


def _descending(keys: torch.Tensor) -> torch.Tensor:
    """Indices of the keys in descending order, the lowest first among equals, which torch.topk does not specify."""
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices


def _keys_of_best_groups(keys: torch.Tensor, scores: torch.Tensor, options: Options) -> torch.Tensor:
    """The keys, with the least integer outside the groups whose two best scores have the largest sums."""
    grouped = keys.unflatten(-1, (options.groups, -1))
    best_two = _descending(grouped)[..., :2]
    sums = scores.unflatten(-1, (options.groups, -1)).gather(-1, best_two).sum(-1)
    kept = _descending(_keys(sums))[..., : options.top_k_groups]
    is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, kept, True)
    return torch.where(is_kept[..., None], grouped, torch.iinfo(keys.dtype).min).flatten(-2)
