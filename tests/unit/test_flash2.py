"""FlashAttention-2's functions of packed tensors, its padding, and partial results that are merged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.tensors import i32

import flashmoe_science as fm
from flashmoe_science.bert_padding import pad_input, unpad_input
from flashmoe_science.integrations import flash_attn

EQUAL: dict[str, float] = {"rtol": 0, "atol": 0}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


QKV, Q, KV = randn(2, 7, 3, 4, 16), randn(2, 5, 4, 16), randn(2, 7, 2, 2, 16)
FLAT, CU = QKV.flatten(0, 1), i32(0, 7, 14)
ROWS, CU_Q = Q.flatten(0, 1), i32(0, 5, 10)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.3},
    {"window_size": (2, 1), "softcap": 2.0},
    {"alibi_slopes": randn(4).abs(), "return_attn_probs": True},
    {"deterministic": True, "kernel": "sdpa"},
]


def flat(*packed: torch.Tensor) -> list[torch.Tensor]:
    return [one.flatten(0, 1) for one in packed]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "none")
def test_packed_tensors_are_their_parts(options: dict[str, Any]) -> None:
    q, k, v = QKV.unbind(2)
    keys, values = KV.unbind(2)
    pairs = [
        (fm.flash_attn_qkvpacked_func(QKV, **options), fm.flash_attn_func(q, k, v, **options)),
        (fm.flash_attn_kvpacked_func(Q, KV, **options), fm.flash_attn_func(Q, keys, values, **options)),
        (
            fm.flash_attn_varlen_qkvpacked_func(FLAT, CU, 7, **options),
            fm.flash_attn_varlen_func(*flat(q, k, v), CU, CU, 7, 7, **options),
        ),
        (
            fm.flash_attn_varlen_kvpacked_func(ROWS, KV.flatten(0, 1), CU_Q, CU, 5, 7, **options),
            fm.flash_attn_varlen_func(ROWS, *flat(keys, values), CU_Q, CU, 5, 7, **options),
        ),
    ]
    for got, right in pairs:
        if "return_attn_probs" in options:
            out, lse, probabilities = got
            assert probabilities is None
            torch.testing.assert_close((out, lse), right[:2], **EQUAL)
        else:
            torch.testing.assert_close(got, right, **EQUAL)


def test_dropout_and_gradients_reach_the_packed_tensor() -> None:
    for call, packed in (
        (lambda one: fm.flash_attn_qkvpacked_func(one, 0.3), QKV),
        (lambda one: fm.flash_attn_kvpacked_func(Q, one, 0.3), KV),
        (lambda one: fm.flash_attn_varlen_qkvpacked_func(one, CU, 7, 0.3), FLAT),
        (lambda one: fm.flash_attn_varlen_kvpacked_func(ROWS, one, CU_Q, CU, 5, 7, 0.3), KV.flatten(0, 1)),
    ):
        leaf = packed.clone().requires_grad_()
        torch.manual_seed(0)
        out = call(leaf)
        out.square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0.0
        torch.manual_seed(1)
        assert not torch.equal(call(packed), out)
        assert fm.explain(call, packed).reason.startswith("dropout_p is 0.3")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}, {"alibi_slopes": randn(4).abs()}])
def test_with_dropout_the_weights_are_returned_and_tell_what_was_left_out(options: dict[str, Any]) -> None:
    k, v = KV.unbind(2)
    dense = fm.flash_attn_func(Q, k, v, 0.3, **options, return_attn_probs=True)
    packed = flash_attn.flash_attn_varlen_func(ROWS, *flat(k, v), CU_Q, CU, 5, 7, 0.3, **options, return_attn_probs=True)
    for out, _, weights in (dense, packed):
        assert weights is not None
        left = (weights < 0.0).sum() / (weights != 0.0).sum()
        assert 0.15 < left < 0.45, left
        kept = weights.clamp(min=0.0) / 0.7
        right = torch.einsum("bhqk,bkhd->bqhd", kept, v.repeat_interleave(2, 2))
        torch.testing.assert_close(out.reshape(Q.shape), right)
        torch.testing.assert_close(weights.abs().sum(-1), torch.ones(2, 4, 5))


def test_flash_attention_2s_order_is_taken_by_its_module() -> None:
    k, v = KV.unbind(2)
    rows, keys, values = flat(Q, k, v)
    out = flash_attn.flash_attn_varlen_func(rows, keys, values, CU_Q, CU, 5, 7, 0.0, 0.3, True)
    torch.testing.assert_close(out.reshape(Q.shape), fm.flash_attn_func(Q, k, v, softmax_scale=0.3, causal=True))
    out, lse, none = flash_attn.flash_attn_varlen_func(rows, keys, values, CU_Q, CU, 5, 7, return_attn_probs=True)
    assert (none, lse.shape) == (None, (4, 10))
    lengths, table = i32(7, 3), i32(0, 1)[:, None]
    got = flash_attn.flash_attn_with_kvcache(
        Q, k, v, None, None, None, None, lengths, None, None, table, 0.3, True, (4, 0), 2.0, True, randn(4).abs(), 1, True
    )
    right = fm.flash_attn_with_kvcache(
        Q, k, v, cache_seqlens=lengths, page_table=table, softmax_scale=0.3, causal=True, window_size=(4, 0), softcap=2.0,
        alibi_slopes=randn(4).abs(), num_splits=1, return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(got, right, **EQUAL)


def test_the_signatures_are_flash_attention_2s() -> None:
    last = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    for function, first in (
        (fm.flash_attn_qkvpacked_func, "qkv"),
        (fm.flash_attn_kvpacked_func, "q kv"),
        (fm.flash_attn_varlen_qkvpacked_func, "qkv cu_seqlens max_seqlen"),
        (fm.flash_attn_varlen_kvpacked_func, "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"),
        (flash_attn.flash_attn_func, "q k v"),
    ):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == [*f"{first} {last}".split(), "kernel"]
        assert parameters["kernel"].kind is inspect.Parameter.KEYWORD_ONLY


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: fm.flash_attn_qkvpacked_func(None), "qkv is a NoneType; it must be a torch.Tensor"),  # type: ignore[arg-type]
    (lambda: fm.flash_attn_qkvpacked_func(Q), "qkv has shape (2, 5, 4, 16); it must be [batch, seqlen, 3, heads, head_dim]"),
    (lambda: fm.flash_attn_qkvpacked_func(KV), "qkv has shape (2, 7, 2, 2, 16); it must be [batch, seqlen, 3"),
    (lambda: fm.flash_attn_kvpacked_func(Q, QKV), "kv has shape (2, 7, 3, 4, 16); it must be [batch, seqlen, 2, heads_kv"),
    (lambda: fm.flash_attn_varlen_qkvpacked_func(QKV, CU, 7), "qkv has shape (2, 7, 3, 4, 16); it must be [total, 3, heads"),
    (
        lambda: fm.flash_attn_varlen_kvpacked_func(ROWS, QKV[0], CU_Q, CU, 5, 7),
        "kv has shape (7, 3, 4, 16); it must be [total_k, 2, heads_kv, head_dim]",
    ),
    (lambda: fm.flash_attn_varlen_qkvpacked_func(FLAT, CU + 1, 7), "cu_seqlens_q begins at 1"),
    (
        lambda: fm.flash_attn_varlen_func(*flat(*QKV.unbind(2)), CU, CU, 7, 7, 0.0, 0.3, True, (-1, -1)),  # type: ignore[arg-type]
        "seqused_q is 0.0, as dropout_p stands in FlashAttention-2's order; from the eighth argument on they must be keywords",
    ),
    (
        lambda: fm.flash_attn_varlen_func(*flat(*QKV.unbind(2)), CU, CU, 7, 7, 0, causal=True),  # type: ignore[arg-type]
        "seqused_q is 0, as dropout_p stands in FlashAttention-2's order; from the eighth argument on they must be keywords",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "what"), REFUSED, ids=[what[:40] for _, what in REFUSED])
def test_it_is_refused_in_one_line(call: Callable[[], object], what: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value).startswith(what), refusal.value
    assert "\n" not in str(refusal.value)


# Padding ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_is_taken_out_and_put_back(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]).to(dtype)
    x = randn(3, 4, 2, 5).requires_grad_()
    rows, indices, starts, longest, used = unpad_input(x, mask)
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 3, 3, 5], torch.int32, 3, [3, 0, 2])
    assert torch.equal(rows, x[mask.bool()])
    back = pad_input(rows, indices, 3, 4)
    assert torch.equal(back, torch.where(mask.bool()[:, :, None, None], x, 0.0))
    assert torch.equal(pad_input(rows, indices.int(), 3, 4), back)
    back.sum().backward()
    assert torch.equal(x.grad, mask.to(x.dtype)[:, :, None, None].expand_as(x))
    out = fm.flash_attn_varlen_func(rows, rows, rows, starts, starts, longest, longest)
    assert pad_input(out, indices, 3, 4).shape == x.shape


def test_rows_may_be_kept_that_are_not_used() -> None:
    mask, unused = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    x = randn(2, 4, 3)
    rows, _, starts, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(rows, torch.cat((x[0, :3], x[1, :3])))
    assert (starts.tolist(), longest, used.tolist()) == ([0, 3, 6], 3, [2, 1])


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 3\); it must be \(2, 4\), as hidden_states begins"):
        unpad_input(randn(2, 4, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"unused_mask has shape \(2, 3\); it must be \(2, 4\), as hidden_states begins"):
        unpad_input(randn(2, 4, 3), torch.ones(2, 4), torch.ones(2, 3))


# Partial results -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_to_pieces_of_the_keys_is_merged(dtype: torch.dtype, packed: bool) -> None:
    q, (k, v) = Q.to(dtype), KV.to(dtype).unbind(2)

    def attend(first: int, last: int) -> Any:
        keys, values = k[:, first:last], v[:, first:last]
        if not packed:
            return fm.flash_attn_func(q, keys, values, return_attn_probs=True)[:2]
        n = last - first
        lengths = (CU_Q, i32(0, n, 2 * n), 5, max(n, 1))
        return fm.flash_attn_varlen_func(*flat(q, keys, values), *lengths, return_attn_probs=True)

    whole, whole_lse = attend(0, 7)
    outs, lses = zip(*(attend(*piece) for piece in ((0, 2), (2, 2), (2, 7))), strict=True)
    out, lse = fm.merge_attention(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(out, whole, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=2e-6)
    stacked = fm.merge_attention(torch.stack(outs), torch.stack(lses))
    assert torch.equal(stacked[0], out)
    again = fm.merge_attention(
        (outs[0], fm.merge_attention(outs[1:], lses[1:])[0]), (lses[0], fm.merge_attention(outs[1:], lses[1:])[1])
    )
    torch.testing.assert_close(again[0], out, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)


def test_rows_without_a_key_in_any_piece_are_zeros() -> None:
    outs, lses = [torch.full((2, 3, 4), torch.nan), randn(2, 3, 4)], [torch.full((3, 2), -torch.inf), randn(3, 2)]
    lses[1][1] = -torch.inf
    out, lse = fm.merge_attention(outs, lses)
    assert torch.all(out[:, 1] == 0.0)
    assert torch.all(lse[1] == -torch.inf)
    torch.testing.assert_close(out[:, 0], outs[1][:, 0])


def test_the_gradients_of_rows_without_a_key_in_a_piece_are_zeros() -> None:
    outs, lses = [torch.full((2, 3, 4), torch.nan), randn(2, 3, 4)], [torch.full((3, 2), -torch.inf), randn(3, 2)]
    lses[1][1] = -torch.inf
    leaves = [one.requires_grad_() for one in (*outs, *lses)]
    out, lse = fm.merge_attention(outs, lses)
    for_first, for_second, *for_lses = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    seen = torch.ones(3, 2).index_fill(0, torch.tensor(1), 0.0)
    assert torch.all(for_first == 0.0)
    assert torch.equal(for_second, seen.mT[..., None].expand(2, 3, 4))
    torch.testing.assert_close(torch.stack(for_lses), torch.stack((torch.zeros(3, 2), seen)))


def test_a_merge_is_differentiable() -> None:
    outs = [randn(2, 3, 4).double().requires_grad_() for _ in range(2)]
    lses = [randn(3, 2).double().requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(
        lambda *given: fm.merge_attention(given[:2], given[2:])[0], (*outs, *lses), fast_mode=True, atol=1e-3
    )


@pytest.mark.parametrize(
    ("outs", "lses", "what"),
    [
        ([], [], "outs has no part; there must be at least one"),
        ([randn(2, 3, 4)], [], "outs has 1 parts and lses 0; they must have as many"),
        ([randn(2, 3, 4)], [randn(2, 3)], r"lses\[0\] has shape \(2, 3\); it must be \(3, 2\)"),
        ([randn(2, 3, 4), randn(2, 3, 5)], [randn(3, 2)] * 2, r"outs\[1\] has shape \(2, 3, 5\) and outs\[0\] \(2, 3, 4\)"),
        (
            [randn(2, 3, 4), randn(2, 3, 4).half()],
            [randn(3, 2)] * 2,
            r"outs\[1\] has dtype torch.float16 and outs\[0\] torch.float32",
        ),
        ([None], [randn(3, 2)], r"outs\[0\] is a NoneType; it must be a torch.Tensor"),
        ([randn(2, 3, 4).int()], [randn(3, 2)], r"outs\[0\] has dtype torch.int32; it must be torch.float16 or"),
        ([randn(2, 3, 4)], [randn(3, 2).half()], r"lses\[0\] has dtype torch.float16; it must be torch.float32 or"),
        ([randn(2, 3, 4)], [randn(3, 2).to("meta")], r"lses\[0\] is on meta and outs\[0\] on cpu; they must be on the same"),
    ],
)
def test_parts_that_do_not_fit_are_refused(outs: Any, lses: Any, what: str) -> None:
    with pytest.raises((TypeError, ValueError), match=what):
        fm.merge_attention(outs, lses)
