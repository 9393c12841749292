"""The arguments of the router, and the checks that refuse bad input before anything is launched.

A refusal is one line: the argument, what it was, what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from flashmoe_science.hardware.probe import is_assumed
from flashmoe_science.ops.checks import check_device, checked_tensor
from flashmoe_science.printable import shown

Scoring = Literal["softmax", "softmax_topk", "sigmoid"]
Normalize = Literal["none", "sum"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ID_DTYPES = (torch.int32, torch.int64)


class Tensors(NamedTuple):
    """The tensors of ``route``, in one order from its arguments to the kernel's pointers."""

    router_logits: torch.Tensor
    selection_bias: torch.Tensor | None = None


class Options(NamedTuple):
    """The other arguments of ``route``, checked; ``top_k_groups`` is 1 where there is one group."""

    top_k: int
    scoring: Scoring = "softmax"
    normalize: Normalize = "none"
    groups: int = 1
    top_k_groups: int = 1
    scaling_factor: float = 1.0


class RouterSums(NamedTuple):
    """``balance_loss``, ``z_loss`` and ``expert_load`` of the same logits and ids."""

    balance: torch.Tensor
    z: torch.Tensor
    load: torch.Tensor


Routed = tuple[torch.Tensor, torch.Tensor]
LossesLaunch = Callable[[torch.Tensor, torch.Tensor], RouterSums]  # of logits and ids that ``route`` chose
RouteGradient = Callable[..., torch.Tensor]  # of logits, ids and dweights, and of losses dbalance, dz and the load
RouteLaunch = Callable[[torch.Tensor, torch.Tensor | None], Routed]  # of the ``Tensors``: a call that checks nothing


def checked_options(router_logits: torch.Tensor, selection_bias: object, *options: Any) -> Options:
    """The options of a call of ``route`` whose arguments are allowed. ``options``: as ``options_of`` takes them. Raises
    TypeError, ValueError: an argument that is not, in one line."""
    experts = check_logits(router_logits)
    checked = options_of(experts, selection_bias is not None, *options)
    if selection_bias is not None:
        _check_bias(selection_bias, router_logits, experts)
    return checked


def options_of(
    experts: int,
    biased: bool,
    top_k: object,
    scoring: object,
    normalize: object,
    groups: object,
    top_k_groups: object,
    scaling_factor: object,
) -> Options:
    """The checked options of calls of ``route`` for a number of experts, with a selection bias or without. Raises TypeError,
    ValueError: one that is not, in one line."""
    _check_word("scoring", scoring, get_args(Scoring))
    _check_word("normalize", normalize, get_args(Normalize))
    top_k = _checked_count("top_k", top_k, experts, "the number of experts")
    groups = _checked_count("groups", groups, experts, "the number of experts")
    for name, given in (("selection_bias", biased), ("groups", groups > 1)):
        if given and scoring != "sigmoid":
            raise ValueError(f"{name} is given and scoring is {scoring!r}; it must be 'sigmoid' then")
    top_k_groups = _checked_groups(groups, top_k_groups, top_k, experts)
    if isinstance(scaling_factor, bool) or not isinstance(scaling_factor, int | float):
        raise TypeError(f"scaling_factor is {shown(scaling_factor)}; it must be a real number")
    if not -math.inf < scaling_factor < math.inf:
        raise ValueError(f"scaling_factor is {scaling_factor}; it must be finite")
    return Options(top_k, cast("Scoring", scoring), cast("Normalize", normalize), groups, top_k_groups, float(scaling_factor))


def check_logits(router_logits: object) -> int:
    """The number of experts of logits that may be routed. Raises TypeError: not a tensor, or of a dtype that is not supported.
    Raises ValueError: not dense, without a dimension or without an expert, or on a device that is not supported."""
    router_logits = checked_tensor("router_logits", router_logits)
    if router_logits.dtype not in _DTYPES:
        allowed = "torch.float32, torch.bfloat16, torch.float16 or torch.float64"
        raise TypeError(f"router_logits has dtype {router_logits.dtype}; it must be {allowed}")
    if router_logits.device.type not in ("cpu", "cuda") and not is_assumed():
        raise ValueError(f"router_logits is on device {router_logits.device}; it must be on a CPU or a CUDA device")
    if router_logits.dim() < 1 or router_logits.shape[-1] < 1:
        raise ValueError(
            f"router_logits has shape {tuple(router_logits.shape)}; it must be [..., experts], of 1 expert or more"
        )
    return router_logits.shape[-1]


def check_ids(top_k_ids: object, experts: object, router_logits: torch.Tensor | None = None) -> None:
    """Raise unless ``top_k_ids`` can be counted by expert: for the tokens of ``router_logits``, where they are given. Raises
    TypeError: not an integer tensor; a number of experts that is no integer. Raises ValueError: not dense, no dimension, or
    other tokens or another device than the logits; a number of experts below 1."""
    _checked_count("experts", experts)
    top_k_ids = checked_tensor("top_k_ids", top_k_ids)
    if top_k_ids.dtype not in _ID_DTYPES:
        raise TypeError(f"top_k_ids has dtype {top_k_ids.dtype}; it must be torch.int32 or torch.int64")
    if top_k_ids.dim() < 1:
        raise ValueError("top_k_ids has no dimension; it must be [..., top_k]")
    if router_logits is None:
        return
    if top_k_ids.shape[:-1] != router_logits.shape[:-1]:
        have = f"top_k_ids has shape {tuple(top_k_ids.shape)} and router_logits {tuple(router_logits.shape)}"
        raise ValueError(f"{have}; they must be equal but for the last dimension")
    check_device("top_k_ids", top_k_ids, "router_logits", router_logits)


def _checked_groups(groups: int, top_k_groups: object, top_k: int, experts: int) -> int:
    """The number of groups that are kept. Raises TypeError, ValueError: not from 1 to ``groups``, or they have fewer than
    ``top_k`` experts; or unequal groups."""
    if experts % groups != 0:
        raise ValueError(f"groups is {groups} and there are {experts} experts; the first must divide the second")
    if top_k_groups is None and groups == 1:
        return 1
    kept = _checked_count("top_k_groups", top_k_groups, groups, "groups")
    in_kept = kept * (experts // groups)
    if top_k > in_kept:
        raise ValueError(f"top_k is {top_k}; it must be at most {in_kept}, the experts of {kept} of {groups} groups")
    return kept


def _check_bias(bias: object, logits: torch.Tensor, experts: int) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"selection_bias is {shown(bias)}; it must be a torch.Tensor or None")
    if bias.dtype != torch.float32:
        raise TypeError(f"selection_bias has dtype {bias.dtype}; it must be torch.float32")
    if bias.is_nested or bias.layout != torch.strided:
        raise ValueError(f"selection_bias is not dense; it must be, of shape ({experts},)")
    if tuple(bias.shape) != (experts,):
        raise ValueError(f"selection_bias has shape {tuple(bias.shape)}; it must be dense, of shape ({experts},)")
    check_device("selection_bias", bias, "router_logits", logits)


def _check_word(name: str, value: object, allowed: tuple[str, ...]) -> None:
    words = ", ".join(map(repr, allowed))
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}; it must be one of {words}")
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {words}")


def _checked_count(name: str, value: object, most: int | None = None, what: str = "") -> int:
    """``value`` where it is an integer from 1 to ``most``, which ``what`` names. Raises TypeError: not an integer; True and
    False are none. Raises ValueError: out of range."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 and (most is None or value <= most):
        return value
    allowed = "at least 1" if most is None else f"from 1 to {most}, {what}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {shown(value)}; it must be an integer {allowed}")
    raise ValueError(f"{name} is {value}; it must be {allowed}")
