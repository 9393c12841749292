"""Bad input: each gets one line that names the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashmoe_science as fm
from flashmoe_science import flash_attention_forward as forward
from flashmoe_science import flash_attention_science as science
from flashmoe_science import flash_attn_func as flash
from flashmoe_science import scaled_dot_product_attention as sdpa


def t(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, **options)


Q = t(2, 4, 8, 16)
CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: sdpa(None, Q, Q), TypeError, "query is a NoneType; it must be a torch.Tensor"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, [1], Q), TypeError, "key is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
    (lambda: science(Q[0], Q[0], Q[0]), ValueError, "q has 3 dimensions; it must have 4"),
    (lambda: sdpa(Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]), ValueError, "query has 1 dimensions; it must have 4"),
    (lambda: sdpa(Q, Q, Q, is_causal="no"), TypeError, "is_causal is 'no'; it must be True or False"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q, is_causal=1), TypeError, "is_causal is 1; it must be True or False"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q, enable_gqa="no"), TypeError, "enable_gqa is 'no'; it must be True or False"),  # type: ignore[arg-type]
    (lambda: fm.explain(Q, Q, Q, is_causal="no"), TypeError, "is_causal is 'no'; it must be"),  # type: ignore[arg-type]
    (lambda: science(Q, Q, Q, "no"), TypeError, "causal is 'no'; it must be True or False"),  # type: ignore[arg-type]
    (lambda: forward(Q, Q, Q, t(64), 0, 1.0), TypeError, "causal is 0; it must be True or False"),  # type: ignore[arg-type]
    (lambda: flash(Q, Q, Q, causal=None), TypeError, "causal is None; it must be True or False"),  # type: ignore[arg-type]
    (lambda: flash(Q, Q, Q, return_attn_probs=2), TypeError, "return_attn_probs is 2; it must be"),  # type: ignore[arg-type]
    (lambda: science(Q, Q, Q[None]), ValueError, "v has 5 dimensions; it must have 4"),
    (lambda: flash(Q[0, 0, 0], Q, Q), ValueError, "q has 1 dimensions; it must have 4"),
    (lambda: flash(Q, None, Q), TypeError, "k is a NoneType"),  # type: ignore[arg-type]
    (lambda: science(Q.int(), Q.int(), Q.int()), TypeError, "q has dtype torch.int32; it must be torch.float16, "),
    (lambda: sdpa(Q.long(), Q.long(), Q.long()), TypeError, "query has dtype torch.int64; it must be torch.float16, "),
    (lambda: sdpa(*3 * [Q.to(torch.complex64)]), TypeError, "query has dtype torch.complex64; it must be"),
    (lambda: sdpa(Q, Q.half(), Q), TypeError, "key has dtype torch.float16 and query has torch.float32"),
    (lambda: science(Q, Q, Q.bfloat16()), TypeError, "v has dtype torch.bfloat16 and q has torch.float32"),
    (lambda: sdpa(Q, Q.to("meta"), Q), ValueError, "key is on meta and query on cpu; they must be on the same device"),
    (lambda: sdpa(Q.to_sparse(), Q, Q), ValueError, "query is a torch.sparse_coo tensor; it must be dense"),
    (lambda: sdpa(Q, Q[:, :2], Q[:, :2]), ValueError, "key has 2 heads and query has 4; without enable_gqa"),
    (
        lambda: sdpa(Q, Q[:, :3], Q[:, :3], enable_gqa=True),
        ValueError,
        "key has 3 heads and query has 4; the first must divide the second",
    ),
    (lambda: science(Q, Q[:, :2], Q), ValueError, "v has 4 heads and k has 2; they must be equal"),
    (lambda: flash(Q, Q[:, :, :3], Q[:, :, :3]), ValueError, "k has 3 heads and q has 8; the first must divide"),
    (lambda: science(Q[..., :0], Q[..., :0], Q), ValueError, "q has head_dim 0; it must be at least 1"),
    (lambda: science(Q, Q[..., :8], Q), ValueError, "k has head_dim 8 and q has 16; they must be equal"),
    (lambda: science(Q, Q[:, :, :5], Q), ValueError, "v has sequence length 8 and k has 5; they must be equal"),
    (lambda: science(Q, Q[:1], Q[:1]), ValueError, "k has batch size 1 and q has 2; they must be equal"),
    (lambda: science(*3 * [Q.to("meta")]), ValueError, "q is on device meta; it must be on a CPU or a CUDA device"),
    (lambda: science(Q, Q[:, :0], Q[:, :0]), ValueError, "k has 0 heads and q has 4; the first must divide the second"),
    (lambda: science(Q[:0], Q, Q), ValueError, "k has batch size 2 and q has 0; they must be equal"),
    (lambda: science(Q, Q, Q[:, :, :0]), ValueError, "v has sequence length 0 and k has 8; they must be equal"),
    (lambda: science(Q.mT, Q, Q), ValueError, "q has stride 16 in its last dimension; it must be contiguous there"),
    (lambda: sdpa(Q, Q, Q, scale=float("nan")), ValueError, "scale is nan; it must be finite"),
    (lambda: sdpa(Q, Q, Q, scale=float("-inf")), ValueError, "scale is -inf; it must be finite"),
    (lambda: sdpa(Q, Q, Q, scale=1j), TypeError, "scale is 1j; it must be a real number or None"),  # type: ignore[arg-type]
    (lambda: science(Q, Q, Q, False, "x"), TypeError, "softmax_scale is 'x'; it must be a real number"),  # type: ignore[arg-type]
    (lambda: science(Q, Q, Q, False, Q), TypeError, "softmax_scale is a tensor of shape (2, 4, 8, 16)"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q[:, :, :5]), ValueError, "value has sequence length 5 and key has 8; they must be equal"),
    (lambda: sdpa(Q, Q, Q, t(7, 8)), ValueError, "attn_mask has shape (7, 8); it must have 2 to 4 dimensions"),
    (lambda: sdpa(Q, Q, Q, t(8, 8).half()), TypeError, "attn_mask has dtype torch.float16; it must be"),
    (lambda: sdpa(Q, Q, Q, "causal"), TypeError, "attn_mask is 'causal'; it must be a torch.Tensor"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q, dropout_p=1.5), ValueError, "dropout_p is 1.5; it must be from 0 to 1"),
    (lambda: sdpa(Q, Q, Q, dropout_p="x"), TypeError, "dropout_p is 'x'; it must be a real number"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q, kernel="fastest"), ValueError, "kernel is 'fastest'; it must be one of"),
    (lambda: sdpa(Q, Q, Q, kernel=["a"]), TypeError, "kernel is ['a']; it must be a string or None"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q, dropout_p=0.5, kernel="fastest"), ValueError, "kernel is 'fastest'; it must be one"),
    (
        lambda: sdpa(Q, Q, Q, dropout_p=0.5, kernel="fwd_triton"),
        ValueError,
        "kernel 'fwd_triton' takes no dropout_p; 'sdpa' does",
    ),
    (
        lambda: sdpa(Q, Q, Q, kernel="fwd_triton"),
        ValueError,
        "kernel 'fwd_triton' cannot serve attn b2 h4 q8 d16 fp32 on the CPU: Triton kernels need a GPU; sdpa can",
    ),
    (lambda: fm.explain(Q, Q, Q, kernel="fwd_triton"), ValueError, "kernel 'fwd_triton' cannot serve"),
    (lambda: fm.explain(Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]), ValueError, "query has 1 dimensions"),
    (lambda: sdpa(Q[0], Q[0], Q[0], kernel="fwd_triton"), ValueError, "query has 3 dimensions; it must have 4"),
    (lambda: flash(Q, Q, Q, dropout_p=-0.1), ValueError, "dropout_p is -0.1; it must be from 0 to 1"),
    (lambda: flash(Q, Q, Q, window_size=4), TypeError, "window_size is 4; it must be two integers"),  # type: ignore[arg-type]
    (lambda: flash(Q, Q, Q, window_size=(4,)), TypeError, "window_size is (4,); it must be two"),  # type: ignore[arg-type]
    (lambda: flash(Q, Q, Q, softcap=-30.0), ValueError, "softcap is -30.0; it must be finite and at least 0.0"),
    (lambda: flash(Q, Q, Q, alibi_slopes=t(4)), ValueError, "alibi_slopes has shape (2, 4); it must be (2, 8)"),
    (lambda: flash(Q, Q, Q, alibi_slopes=t(16)[::2]), ValueError, "alibi_slopes has stride 2 in its last dimension; it must"),
    (lambda: flash(Q, Q, Q, alibi_slopes=t(8).half()), TypeError, "alibi_slopes has dtype torch.float16; it must be"),
    (
        lambda: flash(t(2, 4, 8, 16, requires_grad=True), Q, Q, 0.5, deterministic=True),
        ValueError,
        "deterministic is True, an input requires gradients, and dropout_p is 0.5, which no kernel of ours takes",
    ),
    (lambda: flash(Q, Q, Q, deterministic="yes"), TypeError, "deterministic is 'yes'; it must be True or False"),  # type: ignore[arg-type]
    (
        lambda: flash(Q, Q, Q, alibi_slopes=t(8, requires_grad=True)),
        ValueError,
        "alibi_slopes requires gradients, and is not differentiable: pass alibi_slopes.detach()",
    ),
    (lambda: forward(Q, Q, Q, None, False, 1.0), TypeError, "softmax_lse is a NoneType"),  # type: ignore[arg-type]
    (lambda: forward(Q, Q, Q, t(2, 4, 8).half(), False, 1.0), TypeError, "softmax_lse has dtype torch.float16"),
    (lambda: forward(Q, Q, Q, t(2, 4, 7), False, 1.0), ValueError, "softmax_lse has shape (2, 4, 7); it must be (2, 4, 8)"),
    (lambda: forward(Q, Q, Q, t(128)[::2], False, 1.0), ValueError, "softmax_lse has strides (2,); it must be contiguous"),
    (lambda: forward(Q[0], Q, Q, t(64), False, 1.0), ValueError, "Q has 3 dimensions; it must have 4"),
    (lambda: forward(Q, Q, Q, t(64, requires_grad=True), False, 1.0), ValueError, "softmax_lse requires gradients"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "what"), CASES, ids=[what[:48] for _, _, what in CASES])
def test_it_is_refused_in_one_line(call: Callable[[], object], kind: type[Exception], what: str) -> None:
    for _ in range(2):  # a refusal leaves nothing behind that would let the second call through
        with pytest.raises(kind) as refusal:
            call()
        assert str(refusal.value).startswith(what), refusal.value
        assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    nested = torch.nested.nested_tensor([t(4, 8, 16), t(4, 5, 16)])
    with pytest.raises(ValueError, match="query is a nested tensor; it must be dense"):
        sdpa(nested, nested, nested)
