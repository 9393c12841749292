"""``fused_moe`` of weights in a format on the CPU: right in every layout of checkpoints, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science as fm
from flashmoe_science.moe import dequantize_experts, quantize_experts
from flashmoe_science.ops.moe.call.formats import OF_WEIGHTS

E, H, K, T = 4, 160, 2, 9
FORMS = ("mxfp4", "fp8_block", "fp8_channel", "int4_g32", "int4_g32_zero")
WIDTHS = [
    ("mxfp4", 96),
    ("fp8_block", 96),
    ("fp8_block", 200),
    ("fp8_block", 300),
    ("fp8_channel", 75),
    ("int4_g32", 96),
    ("int4_g32_zero", 96),
]
GPT_OSS: dict[str, Any] = {"activation": "clamped_silu", "interleaved": True}


def given(form: str, width: int = 96, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    """The arguments of a call; no token chooses the last expert."""
    torch.manual_seed(0)
    w1 = torch.randn(E, 2 * width, H) * H**-0.5
    w2 = torch.randn(E, H, width) * width**-0.5
    call = {
        "hidden_states": torch.randn(T, H, dtype=dtype),
        "top_k_weights": torch.rand(T, K),
        "top_k_ids": torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)]),
    }
    biases = {"gate_up_bias": torch.randn(E, 2 * width), "down_bias": torch.randn(E, H)} if options else {}
    return call | quantize_experts(w1, w2, form, interleaved=options.get("interleaved", False)) | biases | options


def dense(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same call with dequantised weights, in the dtype."""
    interleaved = call.get("interleaved", False)
    names = ("gate_up_proj", "down_proj", *OF_WEIGHTS, "weight_format")
    given = {name: call[name] for name in names if name in call}
    w1, w2 = dequantize_experts(**given, interleaved=interleaved, dtype=dtype)
    rest = {name: one for name, one in call.items() if name not in names}
    return rest | {"hidden_states": call["hidden_states"].to(dtype), "gate_up_proj": w1, "down_proj": w2}


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    error = (got.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    assert error < {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-6, torch.float64: 1e-14}[got.dtype]


@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("form", "width"), WIDTHS)
def test_it_is_the_experts_of_dequantised_weights(form: str, width: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    call = given(form, width, dtype, **options)
    close(fm.fused_moe(**call), fm.fused_moe(**dense(call, torch.float64)))


def test_gpt_oss_s_blocks_and_bytes_of_either_sign_are_served_as_they_lie() -> None:
    call = given("mxfp4", **GPT_OSS)
    right = fm.fused_moe(**call)
    blocks = {name: call[name].unflatten(2, (-1, 16)) for name in ("gate_up_proj", "down_proj")}
    e8m0 = {name: call[name].view(torch.float8_e8m0fnu) for name in ("gate_up_scale", "down_scale")}
    signed = {name: call[name].view(torch.int8) for name in ("gate_up_proj", "down_proj")}
    for other in (blocks, e8m0, signed, blocks | e8m0):
        for _ in range(2):  # the second by the launch that the first stored
            assert torch.equal(fm.fused_moe(**call | other), right)


@pytest.mark.parametrize("width", [64, 200, 256])
def test_scales_of_gates_and_ups_by_themselves_and_together(width: int) -> None:
    """vLLM pads each; transformers has those of the joined rows. They differ where 128 does not divide the width."""
    torch.manual_seed(0)
    call = given("fp8_block", width)
    names = ("gate_up_proj", "down_proj", "gate_up_scale", "down_scale")
    gates, ups = torch.randn(E, width, H), 2.0**10 * torch.randn(E, width, H)
    of_each = [quantize_experts(one, torch.randn(E, H, width), "fp8_block") for one in (gates, ups)]
    joined = {name: torch.cat([one[name] for one in of_each], 1) for name in ("gate_up_proj", "gate_up_scale")}
    w1, _ = dequantize_experts(**{name: call[name] for name in names} | joined, weight_format="fp8_block", dtype=torch.float64)
    separate = [one["gate_up_scale"].repeat_interleave(128, 1)[:, :width].repeat_interleave(128, 2)[..., :H] for one in of_each]
    right = torch.cat([one["gate_up_proj"].double() * scale for one, scale in zip(of_each, separate, strict=True)], 1)
    assert torch.equal(w1, right)
    close(fm.fused_moe(**call | joined), fm.fused_moe(**dense(call | joined, torch.float64)))
    e8m0 = {name: torch.randint(115, 125, call[name].shape, dtype=torch.uint8) for name in ("gate_up_scale", "down_scale")}
    powers = {name: one.view(torch.float8_e8m0fnu) for name, one in e8m0.items()}
    floats = {name: 2.0 ** (one.float() - 127) for name, one in e8m0.items()}
    assert torch.equal(fm.fused_moe(**call | powers), fm.fused_moe(**call | floats))
    assert torch.equal(fm.fused_moe(**call | e8m0), fm.fused_moe(**call | floats))
    narrow = {name: call[name].bfloat16() for name in e8m0}  # as Qwen3's have them
    wide = {name: one.float() for name, one in narrow.items()}
    assert torch.equal(fm.fused_moe(**call | narrow), fm.fused_moe(**call | wide))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["fp8_block", "fp8_block_w8a8", "fp8_channel", "fp8_channel_w8a8"])
def test_scales_of_16_bits_are_those_of_32(form: str, dtype: torch.dtype) -> None:
    call = given(form)
    narrow = {name: call[name].to(dtype) for name in ("gate_up_scale", "down_scale")}
    wide = {name: one.float() for name, one in narrow.items()}
    assert torch.equal(fm.fused_moe(**call | narrow), fm.fused_moe(**call | wide))


def test_scales_of_channels_and_of_whole_matrices_in_every_shape_of_checkpoints() -> None:
    call = given("fp8_channel")
    right = fm.fused_moe(**call)
    names = ("gate_up_scale", "down_scale")
    assert torch.equal(fm.fused_moe(**call | {name: call[name][..., None] for name in names}), right)
    one, two = torch.rand(E) + 0.5, torch.rand(E, 2) + 0.5
    whole = {"gate_up_scale": two / 448, "down_scale": one / 448}
    rows = {
        "gate_up_scale": whole["gate_up_scale"].repeat_interleave(96, 1),
        "down_scale": whole["down_scale"][:, None].repeat(1, H),
    }
    right = fm.fused_moe(**call | rows)
    assert torch.equal(fm.fused_moe(**call | whole | {"gate_up_scale": whole["gate_up_scale"][..., None]}), right)
    for down in (one[:, None], one[:, None, None], one):
        for _ in range(2):  # the second by the launch that the first stored
            assert torch.equal(fm.fused_moe(**call | whole | {"down_scale": down / 448}), right)
    w1, _ = dequantize_experts(
        **{name: (call | whole)[name] for name in call if "proj" in name or "scale" in name or "format" in name}
    )
    assert torch.equal(w1, (call["gate_up_proj"].float() * rows["gate_up_scale"][..., None]).bfloat16())


@pytest.mark.parametrize("form", [*FORMS, "fp8_block_w8a8", "fp8_channel_w8a8"])
def test_a_scale_that_is_no_number_and_a_token_that_is_none_reach_what_uses_them(form: str) -> None:
    call = given(form)
    whole = fm.fused_moe(**call)
    scale = call["down_scale"].clone()
    scale[-1] = 255 if form == "mxfp4" else torch.nan  # of the expert that no token chose
    x = call["hidden_states"].clone()
    x[3] = torch.nan
    got = fm.fused_moe(**call | {"down_scale": scale, "hidden_states": x})
    assert got[3].isnan().all()
    others = torch.arange(T) != 3
    assert torch.equal(got[others], whole[others])
    scale[0] = scale[-1]
    got = fm.fused_moe(**call | {"down_scale": scale})
    chose = (call["top_k_ids"] == 0).any(1)
    assert got[chose].isnan().all()
    assert torch.equal(got[~chose], whole[~chose])


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_holds_its_experts_in_a_format(form: str) -> None:
    torch.manual_seed(0)

    def made(**options: Any) -> fm.FlashMoELayer:
        return fm.FlashMoELayer(H, 96, E, K, shared_intermediate_size=8, **options)

    layer, x = made(), torch.randn(T, H, requires_grad=True)
    right = copy.deepcopy(layer)
    held = quantize_experts(layer.gate_up_proj, layer.down_proj, form)
    right.gate_up_proj.data, right.down_proj.data = dequantize_experts(**held, dtype=torch.float32)
    assert layer.quantize(form) is layer
    torch.testing.assert_close(layer(x), right(x))
    torch.testing.assert_close(*(torch.autograd.grad(one(x).square().sum(), x)[0] for one in (layer, right)))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))
    names = {"router_weight", "shared_gate_up_proj", "shared_down_proj"}
    assert {name for name, _ in layer.named_parameters()} == names
    assert f"intermediate=96, experts={E}, top_k={K}, shared=8, {form}" in repr(layer)
    again = made(device="meta").quantize(form).to_empty(device="cpu")
    again.load_state_dict(layer.state_dict())
    for name, one in copy.deepcopy(again).to(torch.bfloat16).state_dict().items():
        assert torch.equal(one, layer.state_dict()[name].bfloat16() if name in names else layer.state_dict()[name]), name
    assert torch.equal(again(x), layer(x))
    assert again.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=f"the layer's weights are in '{form}' already"):
        layer.quantize(form)


def test_a_layer_is_left_as_it_is_where_a_format_is_refused() -> None:
    layer = fm.FlashMoELayer(H, 40, E, K)
    for form, words in (
        ("mxfp4", "down_proj has 40 columns; mxfp4 needs a multiple of 32"),
        ("int3", "weight_format is 'int3'"),
        ("fp8_channel_static", "'fp8_channel_static', whose input scales are a checkpoint's; it must be 'fp8_channel' here"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.quantize(form)
    torch.nn.utils.parametrize.register_parametrization(layer, "down_proj", torch.nn.Identity())
    with pytest.raises(ValueError, match="down_proj is computed, as by a parametrisation; quantize takes a layer whose"):
        layer.quantize("fp8_channel")
    assert layer(torch.randn(T, H)).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_all_but_the_weights(form: str, compiled: bool) -> None:
    call = given(form, dtype=torch.float32, **GPT_OSS)
    names = ("hidden_states", "top_k_weights", "gate_up_bias", "down_bias")
    dout = torch.randn(T, H)

    def gradients(call: dict[str, Any], function: Any) -> tuple[torch.Tensor, ...]:
        leaves = [call[name].detach().requires_grad_() for name in names]
        return torch.autograd.grad(function(**call | dict(zip(names, leaves, strict=True))), leaves, dout.to(leaves[0].dtype))

    function = torch.compile(fm.fused_moe, fullgraph=True, backend="aot_eager") if compiled else fm.fused_moe
    found, right = gradients(call, function), gradients(dense(call, torch.float32), fm.fused_moe)
    for got, one in zip(found, right, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
    call["hidden_states"].requires_grad_()
    reason = fm.explain(fm.fused_moe, **call).reason
    assert f"weights are in {form}, which PyTorch's operators dequantise for the gradients of all but the weights" in reason


@pytest.mark.parametrize("form", FORMS)
def test_adapters_beside_weights_in_a_format(form: str) -> None:
    """LoRA on a quantised base: as beside the dequantised one, and a and b have its gradients."""
    call = given(form, dtype=torch.float32)
    torch.manual_seed(1)
    shapes = (E, 5, H), (E, 192, 5), (E, 8, 96), (E, H, 8)
    parts = [torch.randn(shape).mul_(0.1).requires_grad_() for shape in shapes]
    adapters = (*parts[:2], 0.5), (*parts[2:], 2.0)

    def gradients(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        out = fm.fused_moe(**call, adapters=adapters)
        return out, *torch.autograd.grad(out.square().sum(), parts)

    for got, right in zip(gradients(call), gradients(dense(call, torch.float32)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)
    assert f"weights in {form} are dequantised" in fm.explain(fm.fused_moe, **call, adapters=adapters).reason


def test_explain_says_that_weights_are_dequantised() -> None:
    decision = fm.explain(fm.fused_moe, **given("mxfp4"))
    assert decision.kernel == "grouped_mm"
    assert decision.reason.endswith("; weights in mxfp4 are dequantised before each product")


def test_it_compiles_whole_and_rows_sorted_by_expert_are_served() -> None:
    call = given("mxfp4")
    compiled = torch.compile(lambda kwargs: fm.fused_moe(**kwargs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(call), fm.fused_moe(**call))
    rest = {name: one for name, one in call.items() if not name.startswith("top_k")}
    offsets = torch.tensor([3, 3, 7, 9])
    got = fm.moe.grouped_moe(offsets=offsets, **rest)
    ids = torch.searchsorted(offsets, torch.arange(T), right=True)[:, None]
    assert torch.equal(got, fm.fused_moe(**rest, top_k_ids=ids, top_k_weights=torch.ones(T, 1)))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mxfp4", {"weight_format": "mxfp6"}, "weight_format is 'mxfp6'; it must be None or one of 'mxfp4', 'fp8_block'"),
    ("mxfp4", {"weight_format": None}, "weight_format is None and gate_up_scale is given"),
    ("mxfp4", {"down_scale": None}, "weight_format is 'mxfp4' and down_scale is None"),
    ("mxfp4", {"transposed": True}, "transposed is True and weight_format is 'mxfp4'; it must be False then"),
    (
        "mxfp4",
        {"weight_format": "fp8_block"},
        "gate_up_proj has dtype torch.uint8 and weight_format is 'fp8_block'; it must be",
    ),
    ("fp8_block", {"weight_format": "mxfp4"}, "it must be uint8 or int8 or float4_e2m1fn_x2"),
    ("mxfp4", {"down_proj": torch.zeros(E, H, 24, dtype=torch.uint8)}, "down_proj has 24 bytes a row; they must be a multiple"),
    ("mxfp4", {"down_proj": torch.zeros(E, H, 4, 8, dtype=torch.uint8)}, "it must be [E, N, K / 2] or [E, N, K / 32, 16]"),
    ("mxfp4", {"gate_up_scale": torch.zeros(E, 192, 6, dtype=torch.uint8)}, "gate_up_scale has shape (4, 192, 6); it must be"),
    ("mxfp4", {"gate_up_scale": torch.zeros(E, 192, 5)}, "gate_up_scale has dtype torch.float32 and weight_format is 'mxfp4'"),
    ("fp8_block", {"down_scale": torch.zeros(E, 2, 3)}, "down_scale has shape (4, 2, 3); it must be [4, 2, 1]"),
    ("fp8_block", {"gate_up_scale": torch.zeros(E, 3, 2)}, "has shape (4, 3, 2); it must be [4, 2, 2], or [4, 2, 2]"),
    (
        "fp8_channel",
        {"down_scale": torch.zeros(E, 2)},
        "has shape (4, 2); it must be [4, 160, 1], or [4, 160], or [4], or [4, 1]",
    ),
    ("fp8_channel", {"gate_up_scale": torch.zeros(E, 3)}, "[4, 192], or [4], or [4, 1], or [4, 1, 1], or [4, 2], or [4, 2, 1]"),
    ("fp8_channel", {"interleaved": True, "gate_up_scale": torch.zeros(E, 2)}, "it must be [4, 192, 1], or [4, 192], or [4]"),
    ("fp8_block", {"gate_up_scale": torch.zeros(E, 2, 2).double()}, "float32 or bfloat16 or float16 or float8_e8m0fnu or"),
    ("fp8_channel", {"gate_up_scale": torch.zeros(E, 192).double()}, "it must be float32 or bfloat16 or float16"),
    ("int4_g32", {"gate_up_scale": torch.zeros(E, 192, 4)}, "gate_up_scale has shape (4, 192, 4); it must be [4, 192, 5]"),
    ("int4_g32", {"weight_format": "int4_g128"}, "gate_up_proj has 160 columns; int4_g128 needs a multiple of 128"),
    (
        "int4_g32",
        {"down_proj": torch.zeros(E, H, 48, dtype=torch.uint8)},
        "down_proj has dtype torch.uint8 and weight_format is",
    ),
    ("int4_g32", {"down_proj": torch.zeros(E, H, 3, 4, dtype=torch.int32)}, "it must be [E, N, K / 8]"),
    ("int4_g32", {"down_scale": torch.zeros(E, H, 3).double()}, "it must be float32 or bfloat16 or float16"),
    (
        "int4_g32",
        {"weight_format": "int4_g32_zero"},
        "is 'int4_g32_zero' and gate_up_zero_point is None; a format and both zero",
    ),
    ("int4_g32_zero", {"weight_format": "int4_g32"}, "is 'int4_g32' and gate_up_zero_point is given; a format and both zero"),
    ("int4_g32_zero", {"down_zero_point": None}, "weight_format is 'int4_g32_zero' and down_zero_point is None"),
    ("int4_g32_zero", {"down_zero_point": [0]}, "down_zero_point is a list; it must be a torch.Tensor"),
    ("int4_g32_zero", {"down_zero_point": torch.zeros(E, H, 3, dtype=torch.int8)}, "has dtype torch.int8; it must be int32"),
    (
        "int4_g32_zero",
        {"down_zero_point": torch.zeros(E, H, 3, dtype=torch.int32)},
        "down_zero_point has shape (4, 160, 3); it must be [4, 20, 3]",
    ),
    ("fp8_block", {"down_scale": [1.0]}, "down_scale is a list; it must be a torch.Tensor"),
    ("fp8_block", {"down_scale": torch.zeros(E, 2, 1).requires_grad_()}, "down_scale requires a gradient"),
    ("fp8_block", {"hidden_states": torch.zeros(T, 2 * H)}, "hidden_states has 320 columns, gate_up_proj takes 160"),
    ("mxfp4", {"gate_up_proj": 2 * (torch.zeros(E, 96, 80, dtype=torch.uint8),)}, "is a pair and weight_format is 'mxfp4'"),
    ("mxfp4", {"kernel": "moe_gemv_triton"}, "kernel 'moe_gemv_triton' cannot serve"),
    ("fp8_block", {"kernel": "moe_fp8_gluon_sm90"}, "kernel 'moe_fp8_gluon_sm90' cannot serve"),
    ("fp8_block_w8a8", {"kernel": "moe_grouped_triton"}, "kernel 'moe_grouped_triton' cannot serve"),
    ("fp8_block_w8a8", {"adapters": (None, None)}, "is 'fp8_block_w8a8', which quantises states; it must not"),
    ("mxfp4", {"weight_grads": (None, None)}, "weight_grads is given and weight_format is 'mxfp4'"),
]


@pytest.mark.parametrize(
    ("form", "changed", "message"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else None
)
def test_what_is_not_allowed_is_refused_in_one_line(form: str, changed: dict[str, Any], message: str) -> None:
    call = given(form)
    call["top_k_weights"].requires_grad_("weight_grads" in changed)
    with pytest.raises((TypeError, ValueError)) as caught:
        fm.fused_moe(**call | changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_under_autocast_states_are_cast_and_codes_are_not() -> None:
    call = given("mxfp4", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = fm.fused_moe(**call)
    assert torch.equal(got, fm.fused_moe(**call | {"hidden_states": call["hidden_states"].bfloat16()}))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by opcheck of PyTorch 2.14
def test_the_operator_is_as_pytorch_wants_one_and_counts_its_weights() -> None:
    """PyTorch cannot compare what is e4m3."""
    call = given("mxfp4")
    names = ("gate_up_proj", "down_proj", "top_k_weights", "top_k_ids")
    rest = *(call[name] for name in names), None, None, call["gate_up_scale"], call["down_scale"], *4 * [None]
    for grad in (False, True):
        x = call["hidden_states"].clone().requires_grad_(grad)
        torch.library.opcheck(torch.ops.flashmoe.moe_forward.default, (x, *rest, "silu", True, False, 1.702, 7.0))
    with FlopCounterMode(display=False) as counted:
        fm.fused_moe(**call)
    assert counted.get_total_flops() == 2 * T * K * 3 * H * 96
