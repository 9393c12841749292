"""The experts' load, and the losses that train a router: computed in fp32, in fp64 for fp64; differentiable.

Without coefficients: Switch Transformers (arXiv 2101.03961), equation 4, and ST-MoE (arXiv 2202.08906), equation 5.
"""

from __future__ import annotations

import torch

from flashmoe_science.ops.calls import find_launch, guards_of, store_launch
from flashmoe_science.ops.moe.route.choose import losses_kernels, why_pytorch
from flashmoe_science.ops.moe.route.spec import LossesLaunch, Options, RouterSums, check_ids, check_logits


def balance_loss(router_logits: torch.Tensor, top_k_ids: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss that balances the experts' load: top_k if the load is even, else more.

    experts * sum over experts of (assignments a token) * (mean softmax): Switch's for top_k 1, for more as transformers'
    ``load_balancing_loss_func`` without a mask. Differentiable in ``router_logits`` ([..., experts]); 0 without tokens.
    """
    experts = check_logits(router_logits)
    check_ids(top_k_ids, experts, router_logits)
    wide = torch.promote_types(router_logits.dtype, torch.float32)
    probabilities = torch.softmax(router_logits.to(wide), -1).reshape(-1, experts)
    tokens = max(probabilities.shape[0], 1)
    return experts * (expert_load(top_k_ids, experts).to(wide) / tokens * (probabilities.sum(0) / tokens)).sum()


def z_loss(router_logits: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss that keeps logits small (ST-MoE's): the mean over tokens of the square of their log-sum-exp.

    Differentiable in ``router_logits`` ([..., experts]); 0 without tokens.
    """
    experts = check_logits(router_logits)
    wide = torch.promote_types(router_logits.dtype, torch.float32)
    sums = torch.logsumexp(router_logits.to(wide).reshape(-1, experts), -1)
    return sums.square().sum() / max(sums.shape[0], 1)


def expert_load(top_k_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The number of (token, expert) pairs of each expert.

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


def router_sums(logits: torch.Tensor, ids: torch.Tensor) -> RouterSums:
    """Both losses and the load of ids that ``route`` chose by these logits, by its kernel where that serves them: two launches.
    Not differentiable; the router's backward is."""
    key, given = ("router losses", logits.shape), (logits, ids)
    launch: LossesLaunch | None = find_launch(key, given)
    if launch is None:
        by_kernel = why_pytorch(logits, Options(ids.shape[-1])) is None
        launch = losses_kernels().bind(*given) if by_kernel else _sums_by_pytorch
        store_launch(key, guards_of(given, aligned=True), launch)
    return launch(*given)


def _sums_by_pytorch(logits: torch.Tensor, ids: torch.Tensor) -> RouterSums:
    return RouterSums(balance_loss(logits, ids), z_loss(logits), expert_load(ids, logits.shape[-1]))
