"""A gpt-oss-like checkpoint in mxfp4, loaded as it lies: against the same model dequantised, and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.integrations.test_transformers import CONFIGS, SIZES, TOKENS, calls, logits, model_like, one_thread, registered
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config
from transformers.quantizers import auto

from flashmoe_science.integrations.transformers_mxfp4 import kept_in_mxfp4
from flashmoe_science.moe import dequantize_experts, quantize_experts

__all__ = ["calls", "one_thread", "registered"]
SMALL = GptOssConfig(**SIZES, head_dim=16, intermediate_size=96, num_local_experts=8, sliding_window=8)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model, its parameters in the dtype. ``to`` would cast the frequencies of rotary embeddings too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any]:
    """A folder as gpt-oss's: bf16 but for experts in mxfp4. And the same model, dequantised, in fp32."""
    dense = in_dtype(in_dtype(model_like(SMALL, "eager"), torch.bfloat16), torch.float32)
    tensors = {name: one.bfloat16() for name, one in dense.state_dict().items()}
    for at, layer in enumerate(dense.model.layers):
        made = quantize_experts(layer.mlp.experts.gate_up_proj.mT, layer.mlp.experts.down_proj.mT, "mxfp4", interleaved=True)
        both = dequantize_experts(**made, interleaved=True, dtype=torch.float32)
        for one, name in zip(both, ("gate_up", "down"), strict=True):
            key = f"model.layers.{at}.mlp.experts.{name}_proj"
            del tensors[key]
            tensors[f"{key}_blocks"] = made[f"{name}_proj"].unflatten(-1, (-1, 16)).contiguous()
            tensors[f"{key}_scales"] = made[f"{name}_scale"].view(torch.uint8)
            getattr(layer.mlp.experts, f"{name}_proj").data = one.mT.contiguous()
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    config = SMALL.to_dict() | {"quantization_config": Mxfp4Config(["lm_head"]).to_dict(), "dtype": "bfloat16"}
    config["architectures"] = ["GptOssForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, dense


def loaded(folder: Path, **options: Any) -> Any:
    with kept_in_mxfp4():
        return AutoModelForCausalLM.from_pretrained(folder, **{"experts_implementation": "fms"} | options)


def test_a_checkpoint_is_served_as_it_lies(checkpoint: tuple[Path, Any], calls: list[Any]) -> None:
    folder, dense = checkpoint
    model = loaded(folder)
    stored = load_file(folder / "model.safetensors")
    held = model.state_dict()
    assert held.keys() == stored.keys()
    assert all(held[name].dtype == one.dtype and torch.equal(held[name], one) for name, one in stored.items())
    exact, got = logits(dense), logits(model)
    assert [call.get("weight_format") for call in calls] == ["mxfp4", "mxfp4"]
    wide = loaded(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(wide), exact, rtol=1e-4, atol=1e-5)
    tokens = [one.generate(TOKENS, max_new_tokens=6, do_sample=False) for one in (wide, dense)]
    assert torch.equal(*tokens)
    error, allowed = ((one - exact).square().mean().sqrt() for one in (got, logits(in_dtype(dense, torch.bfloat16))))
    assert error <= 2 * allowed


def test_it_is_written_as_it_was(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    model = loaded(checkpoint[0])
    model.save_pretrained(tmp_path / "again")
    stored, again = (load_file(one / "model.safetensors") for one in (checkpoint[0], tmp_path / "again"))
    assert stored.keys() == again.keys()
    assert all(torch.equal(again[name], one) for name, one in stored.items())
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))


def test_transformers_own_is_back_behind_it_and_what_is_not_served_is_refused(checkpoint: tuple[Path, Any]) -> None:
    before = auto.AUTO_QUANTIZER_MAPPING["mxfp4"]
    with pytest.raises(ValueError, match="experts_implementation is 'eager'; experts that are kept in mxfp4 need 'fms'"):
        loaded(checkpoint[0], experts_implementation="eager")
    with pytest.raises(ValueError, match="dequantize=True; experts that are kept in mxfp4 need it to be False"):
        loaded(checkpoint[0], quantization_config=Mxfp4Config(dequantize=True))
    stored = load_file(checkpoint[0] / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, checkpoint[0] / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint has no model\.layers\.1\.mlp\.experts\.down_proj_scales;"):
        loaded(checkpoint[0])
    with kept_in_mxfp4(), pytest.raises(ValueError, match="MixtralForCausalLM has no GptOssExperts"):
        auto.AutoHfQuantizer.from_config(Mxfp4Config()).preprocess_model(model_like(CONFIGS["mixtral"], "fms"))
    assert auto.AUTO_QUANTIZER_MAPPING["mxfp4"] is before
