"""transformers' models whose experts are in a format, by ``experts_implementation="fms"``, against the dequantised models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.unit.integrations.test_transformers import SIZES, TOKENS, calls, logits, model_like, one_thread, registered
from transformers import FineGrainedFP8Config, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

import flashmoe_science as fm
from flashmoe_science.moe import dequantize_experts, quantize_experts

__all__ = ["calls", "one_thread", "registered"]
FP4 = {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}  # DeepSeek-V4's experts


DENSE = [".*self_attn.*", "lm_head"]  # stay as they are
WIDE = SIZES | {"hidden_size": 160}
QWEN = Qwen3MoeConfig(**WIDE, head_dim=16, intermediate_size=48, moe_intermediate_size=96, num_experts=8)


def in_fp8(**config: Any) -> tuple[Any, Any]:
    """A model with transformers' FP8Experts, and the same model with those weights dequantised, in fp32."""
    dense = model_like(QWEN, "fms")
    model = copy.deepcopy(dense)
    replace_with_fp8_linear(model, DENSE, FineGrainedFP8Config(**config), pre_quantized=True)
    form = "mxfp4" if config.get("expert_dtype") == "fp4" else "fp8_block"
    options = {"powers": True} if config.get("scale_fmt") == "ue8m0" and form == "fp8_block" else {}
    for name, experts in model.named_modules():
        if isinstance(experts, FP8Experts):
            of = dense.get_submodule(name)
            made = quantize_experts(of.gate_up_proj, of.down_proj, form, **options)
            for weight, scale in (("gate_up_proj", "gate_up_scale"), ("down_proj", "down_scale")):
                for attribute, one in ((weight, made[weight]), (f"{weight}_scale_inv", made[scale])):
                    held = getattr(experts, attribute)
                    assert held.shape == one.shape
                    setattr(experts, attribute, torch.nn.Parameter(one.view(held.dtype), requires_grad=held.requires_grad))
            of.gate_up_proj.data, of.down_proj.data = dequantize_experts(**made, dtype=torch.float32)
    return model, dense


@pytest.mark.parametrize(
    ("config", "form"),
    [({}, "fp8_block"), ({"scale_fmt": "ue8m0"}, "fp8_block"), (FP4, "mxfp4")],
    ids=["fp8", "fp8 by powers of two", "fp4"],
)
def test_fp8_experts_are_the_dequantised_ones(config: dict[str, Any], form: str, calls: list[Any]) -> None:
    model, dense = in_fp8(**config)
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-5)
    assert [call.get("weight_format") for call in calls] == [form, form, None, None]
    tokens = [one.generate(TOKENS, max_new_tokens=6, do_sample=False) for one in (model, dense)]
    assert torch.equal(*tokens)


def test_scales_of_whole_matrices_are_served_and_scales_of_blocks_in_bf16() -> None:
    torch.manual_seed(0)
    states, routing = torch.randn(4, 160), (torch.randint(8, (4, 2)), torch.rand(4, 2))
    for block, side, dtype in ((None, 160, torch.float32), ((128, 128), 128, torch.bfloat16)):
        model = model_like(QWEN, "fms")
        config = FineGrainedFP8Config(weight_block_size=block)
        replace_with_fp8_linear(model, DENSE, config, pre_quantized=True)
        experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
        dense = {}
        for name in ("gate_up_proj", "down_proj"):
            codes, scale = (getattr(experts, name + suffix) for suffix in ("", "_scale_inv"))
            codes.data, scale.data = (torch.randn(codes.shape) * 16).to(codes.dtype), (torch.rand(scale.shape) / 64).to(dtype)
            high = 96 if name == "gate_up_proj" else side  # gates and ups each have scales of their own
            wide = scale.double().repeat_interleave(high, 1).repeat_interleave(side, 2)
            dense[name] = codes.double() * wide[:, : codes.shape[1], : codes.shape[2]]
        right = fm.fused_moe(states.double(), **dense, top_k_weights=routing[1], top_k_ids=routing[0])
        torch.testing.assert_close(experts(states, *routing).double(), right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


def test_states_are_quantised_by_the_static_scales_of_a_module() -> None:
    torch.manual_seed(0)
    model = model_like(QWEN, "fms")
    config = FineGrainedFP8Config(weight_block_size=None, activation_scheme="static")
    replace_with_fp8_linear(model, DENSE, config, pre_quantized=True)
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    for name in ("gate_up_proj", "down_proj"):
        codes, scale, of_input = (getattr(experts, name + suffix) for suffix in ("", "_scale_inv", "_activation_scale"))
        codes.data, scale.data = (torch.randn(codes.shape) * 16).to(codes.dtype), torch.rand(scale.shape) / 64
        of_input.data = torch.rand(8) / 64
    states, ids, weights = torch.randn(4, 160), torch.randint(8, (4, 2)), torch.rand(4, 2)
    right = torch.zeros(4, 160)
    for token, (row, chosen) in enumerate(zip(states, ids, strict=True)):  # FP8Experts' eager loop, whose kernel is for a GPU
        for place, one in enumerate(chosen):
            for name, high in (("gate_up_proj", 96), ("down_proj", 160)):
                codes, scale, by = (getattr(experts, name + suffix)[one] for suffix in ("", "_scale_inv", "_activation_scale"))
                row = (row / by).clamp(-448, 448).to(codes.dtype).float() * by
                row = codes.float() * scale.repeat_interleave(high, 0) @ row
                row = experts._apply_gate(row) if name == "gate_up_proj" else row
            right[token] += weights[token, place] * row
            row = states[token]
    torch.testing.assert_close(experts(states, ids, weights), right, rtol=1e-3, atol=1e-3 * right.abs().max().item())


def test_in_bf16_it_is_as_near_to_fp32_as_the_dequantised_model() -> None:
    """The modules are cast but for the experts, of which ``to`` would cast codes too."""
    model, dense = in_fp8()
    exact = logits(dense)
    for module in model.modules():
        if not isinstance(module, FP8Experts):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    error, allowed = ((logits(one) - exact).square().mean().sqrt() for one in (model, dense.bfloat16()))
    assert error <= 2 * allowed


def test_the_states_have_gradients_and_the_weights_have_none() -> None:
    model, dense = in_fp8()
    for one in (model, dense):
        one(TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, dense.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5)
    assert all(one.grad is None for name, one in model.named_parameters() if ".experts." in name)


def test_it_compiles_into_one_graph() -> None:
    experts = in_fp8()[0].model.layers[0].mlp.experts
    routing = torch.tensor([[0, 3], [7, 8]]), torch.rand(2, 2)  # 8 is an expert of another rank
    with torch.no_grad():
        compiled = torch.compile(experts, backend="eager", fullgraph=True)
        states = torch.randn(2, 160)
        assert torch.equal(compiled(states, *routing), experts(states, *routing))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"activation_scheme": "static"},
            r"weights of torch.float8_e4m3fn and block_size \(128, 128\); they must be float8_e4m3fn and None then",
        ),
        (
            FP4 | {"activation_scheme": "static", "weight_block_size": None},
            "weights of torch.int8 and block_size None; they must be",
        ),
        ({"weight_block_size": (64, 64)}, r"FP8Experts has block_size \(64, 64\); it must be \[128, 128\] or None"),
        (
            {"weight_block_size": None, "scale_fmt": "ue8m0"},
            "has dtype torch.float8_e8m0fnu and weight_format is 'fp8_channel'",
        ),
    ],
)
def test_what_is_not_served_is_refused_in_words(config: dict[str, Any], words: str) -> None:
    model = model_like(QWEN, "fms")
    replace_with_fp8_linear(model, DENSE, FineGrainedFP8Config(**config), pre_quantized=True)
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    with pytest.raises((TypeError, ValueError), match=words):
        experts(torch.randn(2, 160), torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 2))
