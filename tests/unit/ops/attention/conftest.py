"""A kernel that stands in for ours on the CPU, and a plan cache that each test finds empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from flashmoe_science.dispatch import registry
from flashmoe_science.kernel import CannotServe, Config, Kernel
from flashmoe_science.ops import attention as operator
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionOutput, Launcher


@dataclass
class FakeKernel:
    """A planned kernel named "fake" that writes a constant; it keeps what it was planned for and counts its launches."""

    planned: list[AttentionInputs] = field(default_factory=list)
    launches: int = 0
    refusal: str | None = None

    def plan(self, inputs: AttentionInputs, config: Config) -> Launcher:
        if self.refusal:
            raise CannotServe(self.refusal)
        self.planned.append(inputs)

        def launch(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
        ) -> None:
            self.launches += 1
            out.fill_(scale)
            if lse is not None:
                lse.fill_(float(self.launches))

        return launch

    def kernel(self) -> Kernel:
        def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
            raise AssertionError("a kernel with a plan is launched by it")

        return Kernel(
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
    monkeypatch.setattr(registry, "KERNELS", (*registry.KERNELS, fake.kernel()))
    return fake


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    operator._PLANS.clear()
    yield
    operator._PLANS.clear()
