"""The backend "fms" in diffusers' registry: a Flux transformer of random weights against diffusers' own backend, and calls.

diffusers is no dependency of the tests; where it is not installed, they are skipped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashmoe_science.integrations import diffusers as ours

dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry = dispatch._AttentionBackendRegistry
    active = registry._active_backend
    ours.register()
    yield
    registry._active_backend = active


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    real = ours.scaled_dot_product_attention
    monkeypatch.setattr(ours, "scaled_dot_product_attention", lambda *args: seen.append(args) or real(*args))
    return seen


def flux(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, torch.Tensor]]:
    """A transformer of two layers, and inputs."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, in_channels=4, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    shapes = {"hidden_states": (1, 9, 4), "encoder_hidden_states": (1, 5, 32), "pooled_projections": (1, 32)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs |= {"timestep": torch.ones(1), "img_ids": torch.rand(9, 3, generator=generator), "txt_ids": torch.zeros(5, 3)}
    return model.eval().to(device, dtype), {name: one.to(device, dtype) for name, one in inputs.items()}


@torch.no_grad()
def test_a_transformer_computes_the_same(calls: list[Any]) -> None:
    model, inputs = flux()
    expected = model(**inputs).sample
    assert not calls
    model.set_attention_backend("fms")
    torch.testing.assert_close(model(**inputs).sample, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2
    model.set_attention_backend("native")
    model(**inputs)
    assert len(calls) == 2


@torch.no_grad()
def test_a_context_serves_by_it(calls: list[Any]) -> None:
    model, inputs = flux()
    expected = model(**inputs).sample
    with dispatch.attention_backend("fms"):
        torch.testing.assert_close(model(**inputs).sample, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs).sample.square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_transformer_trains(checkpointed: bool, calls: list[Any]) -> None:
    model, inputs = flux()
    model.train()
    expected = gradients(model, inputs)
    if checkpointed:
        model.enable_gradient_checkpointing()
    model.set_attention_backend("fms")
    got = gradients(model, inputs)
    assert len(calls) == (4 if checkpointed else 2)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=f"{name} differs")


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_a_transformer_in_bf16_computes_the_same(calls: list[Any]) -> None:
    model, inputs = flux("cuda", torch.bfloat16)
    expected = model(**inputs).sample
    with dispatch.attention_backend("fms"):
        torch.testing.assert_close(model(**inputs).sample, expected, rtol=0.05, atol=0.05)
    assert len(calls) == 2


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 7, 4, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("mask", [None, "keys", "matrix", "added"])
def test_masks_and_options_are_those_of_the_native_backend(mask: str | None) -> None:
    q, k, v = drawn()
    k, v = k[:, :5, :2], v[:, :5, :2]
    seen = torch.rand(2, 5, generator=torch.Generator().manual_seed(3)) > 0.3
    masks = {None: None, "keys": seen, "matrix": seen[:, None, None], "added": torch.where(seen, 0.5, -9.0)[:, None, None]}
    options = {"attn_mask": masks[mask], "scale": 0.3, "enable_gqa": True, "is_causal": mask is None}
    got, expected = (dispatch.dispatch_attention_fn(q, k, v, **options, backend=name) for name in ("fms", "native"))
    torch.testing.assert_close(got, expected)


def test_dropout_drops() -> None:
    q, k, v = drawn()
    out = dispatch.dispatch_attention_fn(q, k, v, dropout_p=0.9, backend="fms")
    assert (out == 0).any() or not torch.allclose(out, dispatch.dispatch_attention_fn(q, k, v, backend="native"))


@pytest.mark.parametrize(
    ("options", "words"), [({"return_lse": True}, "return_lse=True"), ({"_parallel_config": object()}, "context parallelism")]
)
def test_what_is_not_served_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the attention backend 'fms' does not serve {words}")):
        ours.attention(*drawn(), **options)


def test_a_second_registration_changes_nothing() -> None:
    names = dispatch.AttentionBackendName
    before = list(names), dict(dispatch._AttentionBackendRegistry._backends)
    ours.register()
    assert (list(names), dict(dispatch._AttentionBackendRegistry._backends)) == before
    assert names("fms") in names
    assert names("fms").name == "FMS"
    assert before[1]["fms"] is ours.attention


def test_without_diffusers_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    with pytest.raises(ImportError, match=r"the attention backend 'fms' needs diffusers .*: pip install diffusers"):
        ours.register()


def test_a_plain_call_is_attention() -> None:
    q, k, v = drawn()
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours.attention(q, k, v), expected)
