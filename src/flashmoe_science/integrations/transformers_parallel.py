"""transformers' experts on several GPUs by ``expert_parallel_moe``: ``DistributedConfig(ep_implementation="fms")``.

from flashmoe_science.integrations.transformers_parallel import register

register(max_tokens=8192)
config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="fms")
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from flashmoe_science.integrations.transformers import NAME, served
from flashmoe_science.parallel import ExpertWorkspace, expert_parallel_moe
from flashmoe_science.parallel.workspace import Combine, Transports


def register(max_tokens: int, combine: Combine = "exact", transport: Transports | None = None) -> None:
    """Register ``ep_implementation="fms"``, for models that are made later. torch.compile cannot trace it.

    Args:
        max_tokens: the most that a rank has in a forward (its part, if a TP group shares a batch); more are refused.
        combine: as of ``expert_parallel_moe``.
        transport: as of ``ExpertWorkspace``, which layers of one size share. It is made in the first forward.

    Raises:
        ImportError: transformers is not installed, or has no registry of them.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError as error:
        raise ImportError(f"ep_implementation={NAME!r} needs transformers 5.23 or newer") from error
    workspace_of = cache(ExpertWorkspace)

    class Experts(EPImplementation):  # type: ignore[misc]
        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts

        def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.tp_mesh.size() == 1:
                return served(self.experts, hidden, ids, weights, self._moe)
            shared = (DTensor.from_local(one, self.tp_mesh, [Replicate()], run_check=False) for one in (hidden, ids, weights))
            x, own_ids, own_weights = (one.redistribute(placements=[Shard(0)]).to_local() for one in shared)
            out = served(self.experts, x, own_ids, own_weights, self._moe)
            parts = DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=hidden.shape, stride=(hidden.shape[-1], 1))
            return parts.full_tensor()

        def _moe(self, x: torch.Tensor, first: torch.Tensor, down: torch.Tensor, *routing: Any, **options: Any) -> torch.Tensor:
            sizes = max_tokens, x.shape[-1], routing[0].shape[-1], self.num_local_experts * self.ep_mesh.size()
            workspace = workspace_of(self.ep_mesh.get_group(), *sizes, x.dtype, transport)
            return expert_parallel_moe(x, first, down, *routing, workspace=workspace, combine=combine, **options)

    EPImplementationInterface.register(NAME, Experts)
