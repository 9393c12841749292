"""What torchtitan has of mixtures of experts, as far as overrides and a layer go, written anew: names, shapes, order of calls.

Its experts compute in the dtype of the tokens, an expert at a time; torchtitan's in bf16. ``install`` puts it in the place of
torchtitan's modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

OVERRIDES: dict[str, tuple[type, Callable[..., Any]]] = {}


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self._owner(config=replace(self))

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in cls.__dict__:
            cls.__dict__["Config"]._owner = cls


def override(*, target: type, description: str = "") -> Callable[..., Any]:
    def registered(factory: Callable[..., Any]) -> Callable[..., Any]:
        OVERRIDES[f"{factory.__module__}.{factory.__name__}"] = target, factory
        return factory

    return registered


def overridden(name: str, config: Any, **arguments: Any) -> Any:
    """The configuration with the override of that name where it is meant for."""
    target, factory = OVERRIDES[name]
    if isinstance(config, target):
        return factory(config, **arguments)
    parts = {one.name: getattr(config, one.name) for one in fields(config)}
    return replace(config, **{key: overridden(name, one, **arguments) for key, one in parts.items() if hasattr(one, "build")})


def derive(source: Any, target: type, **changes: Any) -> Any:
    shared = {one.name for one in fields(target)} & {one.name for one in fields(source)}
    return target(**{name: getattr(source, name) for name in shared} | changes)


class LocalTokenDispatcher(Configurable):
    """Of one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config: Any) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        pass

    def dispatch(self, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> tuple[Any, ...]:
        order = ids.flatten().argsort(stable=True)
        return x[order // self.top_k], counts, (order, scores)

    def combine(self, rows: torch.Tensor, metadata: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        order, scores = metadata
        return torch.zeros_like(x).index_add(0, order // self.top_k, rows * scores.flatten()[order, None])


class BaseEPTokenDispatcher(LocalTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ep_mesh: Any = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh


class GroupedExperts(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.empty(sizes)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        gates, downs, ups = (one.to_local() if isinstance(one, DTensor) else one for one in weights)
        found = [
            (F.silu(part @ gate.T) * (part @ up.T)) @ down.T
            for part, gate, down, up in zip(rows.split(counts.tolist()), gates, downs, ups, strict=True)
        ]
        return torch.cat(found)


class RoutedExperts(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        inner_experts: GroupedExperts.Config
        token_dispatcher: LocalTokenDispatcher.Config

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner_experts, self.token_dispatcher = config.inner_experts.build(), config.token_dispatcher.build()

    def forward(self, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows, of_experts, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        found = self.token_dispatcher.combine(self.inner_experts(rows, of_experts), metadata, x)
        assert isinstance(found, torch.Tensor)
        return found


class MoE(nn.Module, Configurable):
    """A router that scores by a sigmoid, and routed experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        routed_experts: RoutedExperts.Config
        router: Any = field(default=None)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.routed_experts = config.routed_experts.build()
        sizes = config.routed_experts.inner_experts
        self.gate, self.top_k = nn.Linear(sizes.dim, sizes.num_experts), config.routed_experts.token_dispatcher.top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = self.gate(x).sigmoid().topk(self.top_k, dim=-1, sorted=False)
        counts = torch.zeros(len(x), self.gate.out_features, dtype=torch.bool).scatter_(-1, ids, True).sum(0)
        found = self.routed_experts(x, scores, ids, counts)
        assert isinstance(found, torch.Tensor)
        return found


def install() -> None:
    here: dict[str, tuple[Any, ...]] = {
        "torchtitan.config": (derive, override),
        "torchtitan.models.common.moe": (GroupedExperts, RoutedExperts),
        "torchtitan.models.common.token_dispatcher": (BaseEPTokenDispatcher,),
    }
    for name, members in here.items():
        module = ModuleType(name)
        for one in members:
            setattr(module, one.__name__, one)
        sys.modules[name] = module
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common"):
        sys.modules[name] = ModuleType(name)
