"""A kernel that stands in for ours on the CPU, and plan caches that each test finds empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from flashmoe_science import operations
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops import calls
from flashmoe_science.ops.attention.call.kernel import (
    AttentionInputs,
    AttentionKernel,
    AttentionLaunch,
    AttentionOutput,
    Launcher,
)
from flashmoe_science.ops.attention.call.outputs import Result, out_strides, outputs_of
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front import choose, kernels, operator


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
        return FakeLauncher(self)

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


class FakeLauncher(Launcher):
    """Binds launches that write the scale, and their number into the log-sum-exp."""

    def __init__(self, fake: FakeKernel) -> None:
        self.fake = fake

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        q = tensors.q
        if q.shape[2] == self.fake.refused_rows:
            raise CannotServe("these strides are not for it")
        self.fake.bound.append((tuple(q.shape), out_strides(tensors)))
        of_out, of_lse = outputs_of(tensors, options, out_strides(tensors, out))
        fake, width, aligned = self.fake, q.shape[3], not any(one.data_ptr() & 15 for one in tensors[:3])

        def launch(
            tensors: tuple[torch.Tensor | None, ...],
            scale: float | None,
            length: int,
            out: torch.Tensor | None,
            lse: torch.Tensor | None,
        ) -> Result | None:
            if aligned and any(one.data_ptr() & 15 for one in tensors[:3] if one is not None):
                return None
            fake.launches += 1
            out = torch.empty_strided(of_out.shape, of_out.strides, dtype=of_out.dtype) if out is None else out
            if of_lse is not None:
                lse = torch.empty(of_lse.shape) if lse is None else lse
                lse.fill_(float(fake.launches))
            return out.fill_(width**-0.5 if scale is None else scale), lse

        return launch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(kernels, "PEERS", (*kernels.PEERS, fake.kernel()))
    assert operations.kernel_named("fake").plan == fake.plan
    return fake


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    for cache in (calls.LAUNCHES, choose.PLANS, choose.LAUNCHERS, operator.SEEN):
        cache.clear()
    yield
    for cache in (calls.LAUNCHES, choose.PLANS, choose.LAUNCHERS, operator.SEEN):
        cache.clear()
