"""torchtitan's experts on several GPUs by ``parallel``: two overrides of its configuration.

--override.imports flashmoe_science.integrations.torchtitan.routed_experts      by ``expert_parallel_moe``
--override.imports flashmoe_science.integrations.torchtitan.token_dispatcher    torchtitan's own products between ours
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from flashmoe_science.parallel import ExpertWorkspace, expert_parallel_moe
from flashmoe_science.parallel.rows import Routing, to_experts, to_tokens
from flashmoe_science.parallel.workspace import Combine, Transports

_workspace_of = cache(ExpertWorkspace)  # layers of one size share one


class TokenDispatcher(BaseEPTokenDispatcher):
    """torchtitan's token dispatcher by an ``ExpertWorkspace``, for experts of any kind. Deterministic, also its gradients.

    Each rank receives the tokens of all ranks and sorts them: no counts are exchanged. As in torchtitan, ``dispatch`` waits for
    the number of rows, and all ranks must have equally many tokens; each number has its own workspace.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """``combine``: as of ``expert_parallel_moe``; ``transport``: as of ``ExpertWorkspace``."""

        combine: Combine = "exact"
        transport: Transports | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.combine_by, self.transport = config.combine, config.transport

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        if ep_mesh is None:
            raise ValueError("there is no mesh of experts; parallelism.expert_parallel_degree must be more than 1")
        super().wire_meshes(ep_mesh=ep_mesh)

    def workspace(self, x: torch.Tensor) -> ExpertWorkspace:
        """The workspace for calls with as many tokens as x [T, H]; every rank calls it."""
        sizes = max(1, x.shape[0]), x.shape[1], self.top_k, self.num_experts
        return _workspace_of(self.ep_mesh.get_group(), *sizes, x.dtype, self.transport)

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """The rows of this rank's experts, sorted, how many each expert has, and what ``combine`` needs."""
        return to_experts(self.workspace(x), self.combine_by, x, scores, ids)

    def combine(self, rows: torch.Tensor, routing: Routing, x: torch.Tensor) -> torch.Tensor:
        """[T, H], the sums of this rank's tokens' rows times their scores."""
        return to_tokens(self.workspace(x), self.combine_by, rows, routing)


class Experts(RoutedExperts):
    """torchtitan's routed experts by ``expert_parallel_moe``, in the dtype of the tokens. Parameters stay as they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if type(self.inner_experts) is not GroupedExperts:
            name = type(self.inner_experts).__name__
            raise TypeError(f"experts are {name}, and only GroupedExperts are computed; override token_dispatcher instead")

    # torchtitan finds its inputs by these names.
    def forward(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        experts, dispatcher = self.inner_experts, self.token_dispatcher
        gate, down, up = (one.to(x_TD.dtype) for one in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
        return expert_parallel_moe(
            x_TD, (gate, up), down, topk_scores_TK, topk_expert_ids_TK,
            workspace=dispatcher.workspace(x_TD), combine=dispatcher.combine_by,
        )  # fmt: skip


@override(target=BaseEPTokenDispatcher.Config, description="rows of experts by flashmoe_science.parallel")  # type: ignore[untyped-decorator]
def token_dispatcher(config: Any, *, combine: Combine = "exact", transport: Transports | None = None) -> Any:
    """``TokenDispatcher`` in the place of torchtitan's. torch.compile cannot trace it.

    Args:
        combine: as of ``expert_parallel_moe``.
        transport: as of ``ExpertWorkspace``.
    """
    return derive(config, TokenDispatcher.Config, combine=combine, transport=transport)


@override(target=RoutedExperts.Config, description="experts by expert_parallel_moe")  # type: ignore[untyped-decorator]
def routed_experts(config: Any, *, combine: Combine = "exact", transport: Transports | None = None) -> Any:
    """``Experts`` in the place of torchtitan's. torch.compile cannot trace it.

    Args:
        combine, transport: as of ``token_dispatcher``.
    """
    ours = derive(config.token_dispatcher, TokenDispatcher.Config, combine=combine, transport=transport)
    return derive(config, Experts.Config, token_dispatcher=ours)
