"""PEFT's adapters on the parameters of experts: served beside frozen weights, with the losses and gradients of "eager"."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.integrations.test_transformers import TOKENS, model_of
from torch.nn.utils import parametrize
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flashmoe_science.integrations import transformers as ours


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The adapters of each call of ``fused_moe``."""
    ours.register()
    seen: list[Any] = []
    real = ours.fused_moe
    monkeypatch.setattr(ours, "fused_moe", lambda *args, **given: seen.append(given["adapters"]) or real(*args, **given))
    yield seen
    ours._cached_layout.cache_clear()


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which PEFT 0.21 asks


class Factors(torch.nn.Module):
    """What PEFT 0.21 registers while a model is called: the weights and scaling times lhs times rhs."""

    def __init__(self, lhs: torch.Tensor, rhs: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.lhs, self.rhs, self.scaling = lhs, rhs, scaling

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(weights, self.lhs, self.rhs, alpha=self.scaling)


def experts_of(model: Any) -> Any:
    return next(one for name, one in model.named_modules() if name.endswith(".experts"))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_factors_beside_frozen_weights_are_adapters(family: str, frozen: bool, calls: list[Any]) -> None:
    torch.manual_seed(0)
    experts, rank = copy.deepcopy(experts_of(model_of(family, "fms"))).double().requires_grad_(not frozen), 4
    number, rows, columns = experts.gate_up_proj.shape
    lhs, rhs = (
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((number, rows, rank), (number, rank, columns))
    )
    parametrize.register_parametrization(experts, "gate_up_proj", Factors(lhs, rhs, 0.5))
    x, ids, weights = torch.randn(5, 64).double(), torch.randint(0, number, (5, 2)), torch.rand(5, 2).double()
    found = []
    for function in (ours.experts_forward, ALL_EXPERTS_FUNCTIONS["batched_mm"]):
        out = function(experts, x, ids, weights)
        found.append([out, *torch.autograd.grad(out.square().sum(), (lhs, rhs))])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right)
    assert [one is not None for one in calls] == [frozen]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_a_model_of_peft_trains_as_by_eager(family: str, calls: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=[], target_parameters=names)
    found = {}
    for implementation in ("eager", "fms"):
        torch.manual_seed(1)
        model = peft.get_peft_model(model_of(family, implementation), config).train()
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "lora_" in name:
                    one.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        of_adapters = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        found[implementation] = {"loss": loss.detach(), **of_adapters}
    assert calls
    assert all(one is not None and None not in one for one in calls)
    assert found["eager"].keys() == found["fms"].keys()
    for name, right in found["eager"].items():
        assert right is not None, name
        torch.testing.assert_close(found["fms"][name], right, rtol=1e-3, atol=1e-5)


def test_what_peft_saves_is_what_adapters_are_given() -> None:
    """As docs/integrations.md has it."""
    peft = pytest.importorskip("peft")
    model = model_of("qwen3-moe", "fms")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=[], target_parameters=names))
    wrapper = next(one for one in tuned.modules() if getattr(one, "parameter_name", "") == "down_proj")
    lora_a, lora_b = (part["default"].weight for part in (wrapper.lora_A, wrapper.lora_B))
    torch.nn.init.normal_(lora_b)
    experts, rank = experts_of(tuned).num_experts, 4
    a = lora_a.view(experts, rank, -1)
    b = lora_b.view(-1, rank, experts).permute(2, 0, 1)
    torch.testing.assert_close(wrapper.get_delta_weight("default"), 6 / rank * b @ a)
