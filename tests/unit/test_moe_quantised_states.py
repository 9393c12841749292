"""``fused_moe`` on the CPU where states are quantised: by 128 columns, and by the scales that are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.test_moe_formats import GPT_OSS, E, H, T, close, dense, given

import flashmoe_science as fm
from flashmoe_science.moe import dequantize_experts
from flashmoe_science.ops.calls import LAUNCHES
from flashmoe_science.ops.moe.call.formats import OF_FORMAT, OF_WEIGHTS
from flashmoe_science.ops.moe.front import operator


@pytest.mark.parametrize("width", [96, 200, 256])
@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel"])
def test_what_fp8_weights_are_multiplied_by_is_rounded_to_e4m3_by_128_columns(form: str, width: int) -> None:
    call = given(f"{form}_w8a8", width, torch.float64)
    weights_only = call | {"weight_format": form}
    w1, w2 = (dense(weights_only, torch.float64)[name] for name in ("gate_up_proj", "down_proj"))

    def rounded(row: torch.Tensor) -> torch.Tensor:
        blocks = (block.float() for block in row.split(128))
        scales = [(block, block.abs().max() / 448) for block in blocks]
        return torch.cat([(block / scale).to(torch.float8_e4m3fn).double() * scale.double() for block, scale in scales])

    right = torch.zeros(T, H, dtype=torch.float64)
    for token, row in enumerate(map(rounded, call["hidden_states"])):
        for weight, expert in zip(call["top_k_weights"][token], call["top_k_ids"][token], strict=True):
            gate, up = (w1[expert] @ row).chunk(2)
            right[token] += weight * (w2[expert] @ rounded(torch.nn.functional.silu(gate) * up))
    close(fm.fused_moe(**call), right)
    assert (fm.fused_moe(**weights_only) - right).square().mean().sqrt() > 0.01 * right.square().mean().sqrt()
    compiled = torch.compile(lambda kwargs: fm.fused_moe(**kwargs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(call), fm.fused_moe(**call))


def static(width: int = 96, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    """A call whose states are quantised by given scales, of which some are too small for what they are for."""
    call = given("fp8_channel", width, dtype, **options)
    scales = torch.linspace(1.0, 2.0, 2 * E).view(2, E) * torch.tensor([[2.0], [0.25]]) / 448
    return call | dict(zip(OF_FORMAT[4:], scales, strict=True)) | {"weight_format": "fp8_channel_static"}


def as_given(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp64 rows in e4m3 by a scale that is given."""
    return (rows / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [75, 256])
def test_what_fp8_channels_are_multiplied_by_is_rounded_by_the_scales_that_are_given(width: int, dtype: torch.dtype) -> None:
    call = static(width, dtype)
    weights = {name: call[name] for name in ("gate_up_proj", "down_proj", *OF_WEIGHTS[:2])}
    w1, w2 = dequantize_experts(**weights, weight_format="fp8_channel_static", dtype=torch.float64)
    of_x, of_active = (call[name].double() for name in OF_FORMAT[4:])
    right = torch.zeros(T, H, dtype=torch.float64)
    for token, row in enumerate(call["hidden_states"].double()):
        for weight, expert in zip(call["top_k_weights"][token], call["top_k_ids"][token], strict=True):
            gate, up = (w1[expert] @ as_given(row, of_x[expert])).chunk(2)
            right[token] += weight * (w2[expert] @ as_given(torch.nn.functional.silu(gate) * up, of_active[expert]))
    got = fm.fused_moe(**call)
    error = ((got.double() - right).norm() / right.norm()).item()
    assert error < (1e-6 if dtype in (torch.float32, torch.float64) else 0.03)  # of codes beside a rounding boundary
    compiled = torch.compile(lambda kwargs: fm.fused_moe(**kwargs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(call), got)


def test_input_scales_in_every_shape_of_checkpoints() -> None:
    call = static()
    names, right = OF_FORMAT[4:], fm.fused_moe(**call)
    assert torch.equal(fm.fused_moe(**call | {name: call[name][:, None] for name in names}), right)
    assert torch.equal(fm.fused_moe(**call | {name: call[name].repeat_interleave(3)[::3] for name in names}), right)
    narrow = {name: call[name].bfloat16() for name in names}
    assert torch.equal(
        fm.fused_moe(**call | narrow), fm.fused_moe(**call | {name: one.float() for name, one in narrow.items()})
    )
    right = fm.fused_moe(**call | {name: call[name][:1].repeat(E) for name in names})
    for one in (lambda scale: scale[0], lambda scale: scale[:1], lambda scale: scale[:1].expand(E)):
        for _ in range(2):  # the second by the launch that the first stored
            assert torch.equal(fm.fused_moe(**call | {name: one(call[name]) for name in names}), right)


def test_explain_names_the_format_whose_states_are_quantised() -> None:
    reason = fm.explain(fm.fused_moe, **static()).reason
    assert "weights in fp8_channel_static are dequantised before each product" in reason


def rounded(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows in e4m3 by 128 columns or by the scale that is given; the derivative is 1."""
    if scale is not None:
        made = as_given(rows.detach().double(), scale)
    else:
        blocks = rows.detach().split(128, -1)
        of_blocks = [(block, block.abs().amax(-1, keepdim=True) / 448) for block in blocks]
        made = torch.cat([(block / by).to(torch.float8_e4m3fn).float() * by for block, by in of_blocks], -1)
    return made.to(rows.dtype) + rows - rows.detach()


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"kernel": "grouped_mm"}, "compiled"], ids=str)
@pytest.mark.parametrize("form", ["fp8_block_w8a8", "fp8_channel_w8a8", "fp8_channel_static"])
def test_gradients_where_states_are_quantised(form: str, how: Any) -> None:
    """Of rounding to e4m3 the derivative is 1; the gradient of a routing weight is what it was multiplied by."""
    made = static if form == "fp8_channel_static" else lambda *given_, **options: given(form, *given_, **options)
    call = made(96, torch.float32, **GPT_OSS)
    names = ("hidden_states", "top_k_weights", "gate_up_bias", "down_bias")
    dout, leaves = torch.randn(T, H), [call[name].clone().requires_grad_() for name in names]
    with_leaves = call | dict(zip(names, leaves, strict=True))
    function = torch.compile(fm.fused_moe, fullgraph=True, backend="aot_eager") if how == "compiled" else fm.fused_moe
    out = function(**with_leaves, **({} if how == "compiled" else how))
    assert torch.equal(out, fm.fused_moe(**call))
    found = torch.autograd.grad(out, leaves, dout)

    (x, weights, up_bias, down_bias), right = leaves, torch.zeros(T, H)
    w1, w2 = (dense(call | dict.fromkeys(OF_FORMAT[4:]), torch.float32)[name] for name in ("gate_up_proj", "down_proj"))
    of_x, of_active = (call.get(name) for name in OF_FORMAT[4:])
    for token in range(T):
        for place, expert in enumerate(call["top_k_ids"][token].tolist()):
            both = w1[expert] @ rounded(x[token], None if of_x is None else of_x[expert]) + up_bias[expert]
            gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
            active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            row = w2[expert] @ rounded(active, None if of_active is None else of_active[expert]) + down_bias[expert]
            right = right.index_add(0, torch.tensor([token]), (weights[token, place] * row)[None])
    torch.testing.assert_close(out, right, rtol=1e-3, atol=1e-3)
    for got, one in zip(found, torch.autograd.grad(right, leaves, dout), strict=True):
        torch.testing.assert_close(got, one, rtol=1e-3, atol=1e-3)


def test_explain_names_what_serves_gradients_where_states_are_quantised() -> None:
    call = static()
    call["hidden_states"].requires_grad_()
    reason = fm.explain(fm.fused_moe, **call).reason
    assert "weights are in fp8_channel_static, which PyTorch's operators dequantise for the gradients of all but the" in reason


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"gate_up_input_scale": None},
        "is 'fp8_channel_static' and gate_up_input_scale is None; a format and both input",
    ),
    ({"weight_format": "fp8_channel"}, "is 'fp8_channel' and gate_up_input_scale is given; a format and both input"),
    ({"down_input_scale": 0.5}, "down_input_scale is a float; it must be a torch.Tensor"),
    (
        {"down_input_scale": torch.ones(E).double()},
        "has dtype torch.float64; it must be float32 or bfloat16 or float16",
    ),
    ({"down_input_scale": torch.ones(2, E)}, "has shape (2, 4); it must be [4], or [4, 1], or [1], or []"),
    ({"down_input_scale": torch.ones(E).requires_grad_()}, "down_input_scale requires a gradient"),
    ({"kernel": "moe_weights_gluon_sm90"}, "kernel 'moe_weights_gluon_sm90' cannot serve"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else None)
def test_what_is_not_allowed_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        fm.fused_moe(**static() | changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OF_FORMAT[4:])
@pytest.mark.parametrize(("value", "words"), [(0.0, "0"), (-2.0, "-2"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_an_input_scale_that_is_not_above_0_is_refused_in_every_call(name: str, value: float, words: str) -> None:
    call = static()
    fm.fused_moe(**call)  # from here on its launch is found
    right = call[name].clone()
    for gradients in (False, True):
        call["hidden_states"].requires_grad_(gradients)
        call[name][1] = value
        with pytest.raises(ValueError, match=f"^{name} has a value of {words}; it must be above 0 and finite$"):
            fm.fused_moe(**call)
        call[name].copy_(right)
        fm.fused_moe(**call)


@pytest.mark.gpu
def test_an_input_scale_on_a_gpu_is_refused_where_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "CHECK", True)
    LAUNCHES.clear()
    call = {name: one.cuda() if isinstance(one, torch.Tensor) else one for name, one in static().items()}
    fm.fused_moe(**call)
    call["down_input_scale"].zero_()
    with pytest.raises(ValueError, match=r"^down_input_scale has a value of 0; it must be above 0 and finite$"):
        fm.fused_moe(**call)
    LAUNCHES.clear()
