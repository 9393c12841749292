"""The public functions on the CPU against plain attention in fp64, and their signatures against the ones they take after."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm
from flashmoe_science.kernel import CannotServe

# fp32 accumulates over up to 130 keys; the 16-bit types round inputs' products and the output once each.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [  # batch, heads, heads_kv, queries, keys, head_dim, head_dim_v
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 4, 65, 65, 64, 64),
    (2, 6, 2, 5, 9, 7, 7),
    (1, 4, 1, 9, 5, 80, 24),
    (1, 2, 2, 1, 130, 40, 256),
    (1, 2, 1, 130, 3, 256, 4),
]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int | None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64, query i seeing keys up to i + offset: (out, log-sum-exp)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if offset is not None:
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        scores = scores.masked_fill(columns > rows + offset, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse.isinf()[..., None], 0.0, (scores - lse[..., None]).exp())
    return weights @ v.repeat_interleave(group, 1), lse


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, heads_kv, queries, keys, width, width_v = shape
    generator = torch.Generator().manual_seed(hash(shape) % 2**31)
    sizes = ((batch, heads, queries, width), (batch, heads_kv, keys, width), (batch, heads_kv, keys, width_v))
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_function_gives_exact_attention_with_its_own_alignment(
    shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = tensors(shape, dtype)
    near = {"rtol": 0, "atol": ROUNDING[dtype]}
    top_left, _ = plain(q, k, v, 0 if causal else None)
    bottom_right, expected_lse = plain(q, k, v, k.shape[2] - q.shape[2] if causal else None)

    out = fm.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), top_left, **near)

    torch.testing.assert_close(fm.flash_attention_science(q, k, v, causal).double(), bottom_right, **near)

    lse = torch.full((q.shape[0] * q.shape[1] * q.shape[2],), torch.nan)
    filled = fm.flash_attention_forward(q, k, v, lse, causal, None)
    torch.testing.assert_close(filled.double(), bottom_right, **near)
    torch.testing.assert_close(lse.view(q.shape[:3]).double(), expected_lse, rtol=1e-6, atol=2e-6)

    token_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    result = fm.flash_attn_func(*token_first, causal=causal, return_attn_probs=True)
    assert isinstance(result, tuple)
    torch.testing.assert_close(result[0].transpose(1, 2).double(), bottom_right, **near)
    torch.testing.assert_close(result[1].double(), expected_lse, rtol=1e-6, atol=2e-6)
    assert result[2] is None


def test_a_query_that_sees_no_key_gets_zeros_and_minus_infinity() -> None:
    q, k, v = tensors((1, 2, 2, 6, 4, 8, 8), torch.float32)
    lse = torch.zeros(1, 2, 6)
    out = fm.flash_attention_forward(q, k, v, lse, True, None)
    assert torch.all(out[:, :, :2] == 0.0)
    assert torch.all(lse[:, :, :2] == -torch.inf)
    assert torch.all(lse[:, :, 2:].isfinite())


@pytest.mark.parametrize(("width", "width_v"), [(257, 257), (16, 300)])
def test_heads_wider_than_our_kernels_take_are_served_by_pytorch(width: int, width_v: int) -> None:
    q, k, v = tensors((1, 4, 2, 5, 7, width, width_v), torch.float32)
    expected, _ = plain(q, k, v, None)
    torch.testing.assert_close(fm.flash_attention_science(q, k, v).double(), expected, rtol=0, atol=5e-6)
    with pytest.raises(CannotServe, match="'split_triton' cannot serve this call: no kernel of ours takes the input: head_dim"):
        fm.scaled_dot_product_attention(q, k, v, enable_gqa=True, kernel="split_triton")
    assert "no kernel of ours takes the input: head_dim" in fm.explain(q, k, v, enable_gqa=True).reason


def test_the_log_sum_exp_is_taken_in_pieces_without_changing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.ops.attention.front import pytorch

    q, k, v = tensors((2, 6, 2, 37, 21, 16, 16), torch.float32)
    for causal in (False, True):
        monkeypatch.setattr(pytorch, "_SCORES_AT_ONCE", 2**24)
        whole, pieces = torch.zeros(2, 6, 37), torch.zeros(2, 6, 37)
        fm.flash_attention_forward(q, k, v, whole, causal, None)
        monkeypatch.setattr(pytorch, "_SCORES_AT_ONCE", 5 * 2 * 6 * 21)
        fm.flash_attention_forward(q, k, v, pieces, causal, None)
        torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3, 1e-3])
def test_any_finite_scale_serves(scale: float) -> None:
    q, k, v = tensors((2, 4, 4, 17, 17, 16, 16), torch.float32)
    expected, _ = plain(q, k, v, 0, scale)
    near = {"rtol": 0, "atol": 2e-6 * max(1.0, abs(scale) / 16**-0.5)}  # the scores' rounding errors grow with the scale
    torch.testing.assert_close(fm.flash_attention_science(q, k, v, True, scale).double(), expected, **near)
    out = fm.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    torch.testing.assert_close(out.double(), expected, **near)


def test_strides_need_only_a_contiguous_last_dimension() -> None:
    packed = torch.randn(2, 9, 3, 4, 20)  # [batch, tokens, qkv, heads, width]
    q, k, v = (packed[:, :, i, :, 2:18].transpose(1, 2) for i in range(3))
    broadcast = v[:, :1].expand(2, 4, 9, 16)
    torch.testing.assert_close(
        fm.scaled_dot_product_attention(q, k, broadcast).double(), plain(q, k, broadcast, None)[0], rtol=0, atol=2e-6
    )


def test_attention_masks_and_dropout_are_pytorchs_own() -> None:
    q, k, v = tensors((2, 4, 4, 8, 8, 16, 16), torch.float32)
    for mask in (torch.rand(8, 8) > 0.3, torch.randn(2, 1, 1, 8)):
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(fm.scaled_dot_product_attention(q, k, v, mask), expected, rtol=0, atol=0)
        decision = fm.explain(q, k, v, mask)
        assert (decision.kernel, decision.basis) == ("sdpa", "required")
        assert "attn_mask" in decision.reason
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
    torch.manual_seed(1)
    assert torch.equal(fm.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True), expected)
    assert "dropout_p" in fm.explain(q, k, v, dropout_p=0.5).reason


@pytest.mark.parametrize("queries", [5, 9, 13])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_plain_attention(queries: int, causal: bool) -> None:
    inputs = [x.requires_grad_() for x in tensors((2, 4, 2, queries, 9, 16, 24), torch.float32)]
    lse = torch.zeros(2 * 4 * queries)
    weight = torch.randn(2, 4, queries, 24)
    fm.flash_attention_forward(*inputs, lse, causal, None).mul(weight).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_lse = plain(*exact, 9 - queries if causal else None)
    # A row that sees no key has no weights, and in the plain form NaN gradients: leave it out of the sum.
    seen = expected_lse.isfinite()
    expected[seen].mul(weight.double()[seen]).sum().backward()
    for got, want in zip(inputs, exact, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad.nan_to_num(), rtol=0, atol=5e-6)
    torch.testing.assert_close(lse.view(2, 4, queries).double(), expected_lse.detach(), rtol=1e-6, atol=2e-6)


def test_pytorch_can_be_asked_for_by_name() -> None:
    q, k, v = tensors((2, 4, 4, 8, 8, 16, 16), torch.float32)
    decision = fm.explain(q, k, v, kernel="sdpa")
    assert (decision.kernel, decision.basis) == ("sdpa", "requested")
    torch.testing.assert_close(fm.scaled_dot_product_attention(q, k, v, kernel="sdpa"), F.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(fm.scaled_dot_product_attention(q, k, v, kernel="sdpa_math").double(), plain(q, k, v, None)[0],
                               rtol=0, atol=2e-6)  # fmt: skip


def parameters(function: object) -> dict[str, object]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}  # type: ignore[arg-type]


def test_the_signatures_are_the_ones_that_the_field_knows() -> None:
    documented = F.scaled_dot_product_attention.__doc__
    assert documented is not None
    head = " ".join(documented.split("->")[0].split())
    ours = parameters(fm.scaled_dot_product_attention)
    assert ours.pop("kernel") is None
    ours["dropout_p"] = float(ours["dropout_p"])  # type: ignore[arg-type]  # 0: test_training_tools.py says why
    shown = ", ".join(name if default is inspect.Parameter.empty else f"{name}={default}" for name, default in ours.items())
    assert head == f"scaled_dot_product_attention({shown})"
    assert list(parameters(fm.flash_attn_func)) == [
        "q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
        "return_attn_probs", "kernel",
    ]  # fmt: skip
    assert inspect.signature(fm.flash_attn_func).parameters["kernel"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters(fm.flash_attention_science)) == ["q", "k", "v", "causal", "softmax_scale"]
    assert list(parameters(fm.flash_attention_forward)) == ["Q", "K", "V", "softmax_lse", "causal", "softmax_scale"]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as where it is not installed
import torch
import flashmoe_science as fm
q = torch.randn(1, 2, 3, 16)
assert torch.equal(fm.scaled_dot_product_attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
print(fm.explain(q, q, q))
try:
    fm.scaled_dot_product_attention(q, q, q, kernel="fwd_triton")
except ValueError as error:
    print(error)
"""


def test_where_triton_is_not_installed_pytorch_serves_and_the_decision_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    decision, _, refusal = done.stdout.rstrip().rpartition("\n")
    assert decision.startswith("sdpa: ")
    assert "Triton is not installed" in decision
    assert refusal.startswith("kernel is 'fwd_triton'; it must be one of")
    assert "Triton is not installed" in refusal
