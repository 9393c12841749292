"""What the functions of formats refuse, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashmoe_science as fm

E, H, WIDTH = 3, 128, 64
PROJECTIONS: dict[str, Any] = {"gate_up_proj": torch.zeros(E, 2 * WIDTH, H), "down_proj": torch.zeros(E, H, WIDTH)}
FP8: dict[str, Any] = fm.quantize_experts(**PROJECTIONS, weight_format="fp8_block")
OF_TWO = fm.quantize_experts(*(one[:2] for one in PROJECTIONS.values()), weight_format="fp8_block")


def refused(function: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_format": "fp8_channel_static"}, "input scales are a checkpoint's; it must be 'fp8_channel' here"),
        ({"down_proj": torch.zeros(2, H, WIDTH)}, "gate_up_proj has 3 experts and down_proj 2; they must have as many"),
        ({"down_proj": torch.zeros(E, WIDTH, H)}, "gate_up_proj takes 128 columns and down_proj gives 64; they must agree"),
        ({"gate_up_proj": torch.zeros(E, 100, H)}, "gate_up_proj has 100 rows an expert and down_proj 64 columns"),
        (
            {"gate_up_proj": torch.zeros(128, H)},
            "gate_up_proj has shape (128, 128); it must have three dimensions, experts first",
        ),
        (
            {"down_proj": torch.zeros(E, H, WIDTH).double()},
            "down_proj has dtype torch.float64; it must be bfloat16 or float16 or",
        ),
        ({"down_proj": [1.0]}, "down_proj is a list; it must be a torch.Tensor"),
        ({"interleaved": "no"}, "interleaved is 'no'; it must be True or False"),
        ({"powers": 1}, "powers is 1; it must be True or False"),
    ],
)
def test_what_quantising_refuses(changed: dict[str, Any], message: str) -> None:
    refused(fm.quantize_experts, PROJECTIONS | {"weight_format": "fp8_block"} | changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({name: OF_TWO[name] for name in ("down_proj", "down_scale")}, "gate_up_proj has 3 experts and down_proj 2"),
        ({"down_proj": FP8["down_proj"][:, :64]}, "gate_up_proj takes 128 columns and down_proj gives 64; they must agree"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; it must be bfloat16, float16, float32 or float64"),
        ({"dtype": torch.int8}, "dtype is torch.int8; it must be bfloat16, float16, float32 or float64"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn; it must be bfloat16"),
        ({"interleaved": 0}, "interleaved is 0; it must be True or False"),
    ],
)
def test_what_dequantising_refuses(changed: dict[str, Any], message: str) -> None:
    refused(fm.dequantize_experts, FP8 | changed, message)


def test_a_call_of_weights_in_a_format_that_lie_the_other_way_is_told_how_they_must() -> None:
    routing = {"top_k_weights": torch.ones(2, 1), "top_k_ids": torch.zeros(2, 1, dtype=torch.int64)}
    other = {name: FP8[name].mT for name in ("gate_up_proj", "down_proj")}
    words = "and down_proj gives 64; they must agree (weights in a format are [experts, out, in])"
    refused(fm.fused_moe, {"hidden_states": torch.zeros(2, H)} | routing | FP8 | other, words)
