"""A kernel that stands in for ours on the CPU, and plan caches that each test finds empty.

The scripts beside this file are shared with processes of their own, so they are imported by name in both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from flashmoe_science import operations
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.attention.call.inputs import (
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    BoundBy,
    BoundLaunch,
    Launcher,
    Shapes,
)
from flashmoe_science.ops.attention.front import kernels, plans, torch_op

sys.path.insert(0, str(Path(__file__).parent))


@dataclass
class FakeKernel:
    """A planned kernel named "fake" that writes the scale; it keeps the problems that it was planned for and bound to."""

    planned: list[str] = field(default_factory=list)
    bound: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)  # shape of q, strides of out
    launches: int = 0
    refusal: str | None = None
    refused_rows: int = 0  # queries of a call that it cannot bind

    def plan(self, inputs: AttentionInputs, config: Config) -> Launcher:
        if self.refusal:
            raise CannotServe(self.refusal)
        self.planned.append(str(inputs.problem))
        return BoundBy(self._bind)

    def _bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        if shapes[0][2] == self.refused_rows:
            raise CannotServe("these strides are not for it")
        self.bound.append((tuple(shapes[0]), strides[3]))
        return self._launch

    def _launch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
    ) -> None:
        self.launches += 1
        out.fill_(scale)
        if lse is not None:
            lse.fill_(float(self.launches))

    def kernel(self) -> AttentionKernel:
        def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
            raise AssertionError("a kernel with a plan is launched by it")

        return AttentionKernel(
            name="fake",
            origin="ours",
            op="attention",
            about="",
            supports=lambda problem, device: None,
            configs=lambda problem, device: (Config(m=1),),
            run=run,
            launches=lambda problem, config, gpu: (),
            plan=self.plan,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(kernels, "PEERS", (*kernels.PEERS, fake.kernel()))
    assert operations.kernel_named("fake").plan == fake.plan
    return fake


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    for cache in (torch_op.CALLS, torch_op.KNOWN, plans.PLANS):
        cache.clear()
    yield
    for cache in (torch_op.CALLS, torch_op.KNOWN, plans.PLANS):
        cache.clear()
