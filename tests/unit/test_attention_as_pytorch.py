"""What PyTorch's own function takes, ``scaled_dot_product_attention`` takes, with its result; what it refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


Q, K, V = tensor(2, 4, 8, 16), tensor(2, 4, 9, 16), tensor(2, 4, 9, 24)
SERVED: dict[str, Arguments] = {
    "batch 0": ((Q[:0], K[:0], V[:0]), {}),
    "no heads": ((Q[:, :0], K[:, :0], V[:, :0]), {}),
    "no queries": ((Q[:, :, :0], K, V), {"is_causal": True}),
    "no keys": ((Q, K[:, :, :0], V[:, :, :0]), {}),
    "no keys, causal": ((Q, K[:, :, :0], V[:, :, :0]), {"is_causal": True}),
    "2-D": ((Q[0, 0], K[0, 0], V[0, 0]), {}),
    "3-D": ((Q[0], K[0], V[0]), {"is_causal": True}),
    "5-D": ((Q[None], K[None], V[None]), {}),
    "a batch that broadcasts": ((Q, K[:1], V[:1]), {}),
    "heads that broadcast": ((Q, K[:, :1], V[:, :1]), {"is_causal": True}),
    "a query that broadcasts": ((Q[:1], K, V), {}),
    "grouped heads of one batch": ((Q, K[:1, :2], V[:1, :2]), {"enable_gqa": True}),
    "fp64": ((Q.double(), K.double(), V.double()), {"scale": 0.3}),
    "a mask in 3-D": ((Q[0], K[0], V[0], torch.rand(8, 9) > 0.3), {}),
    "head dimension 300": ((tensor(1, 2, 5, 300), tensor(1, 2, 6, 300), tensor(1, 2, 6, 300)), {}),
    "head dimension 0": ((Q[..., :0], K[..., :0], V), {}),
    "a last dimension of other strides": ((tensor(2, 4, 16, 8).mT, K, V), {}),
    "a lazily negated view": ((torch._neg_view(Q), K, V), {}),
    "a meta tensor": ((Q.to("meta"), K.to("meta"), V.to("meta")), {}),
    "dropout of everything": ((Q, K, V), {"dropout_p": 1.0}),
}
ORDINARY: dict[str, Arguments] = {
    "as usual": ((Q, K, V), {}),
    "causal": ((Q, K, V), {"is_causal": True}),
    "grouped": ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True}),
    "bf16": ((Q.bfloat16(), K.bfloat16(), V.bfloat16()), {"scale": 0.7}),
}
REFUSED: dict[str, Arguments] = {
    "1-D": ((Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), {}),
    "heads that do not broadcast": ((Q, K[:, :2], V[:, :2]), {}),
    "heads that do not divide": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    "a batch that does not broadcast": ((tensor(3, 4, 8, 16), K, V), {}),
    "other head dimensions": ((Q, K[..., :8], V), {}),
    "other dtypes": ((Q, K.half(), V), {}),
    "other devices": ((Q, K.to("meta"), V), {}),
    "integers": ((Q.long(), K.long(), V.long()), {}),
    "a mask of other sizes": ((Q, K, V, torch.zeros(7, 9)), {}),
    "a mask of another dtype": ((Q, K, V, torch.zeros(8, 9).half()), {}),
    "a mask of one dimension": ((Q, K, V, torch.zeros(9)), {}),
    "a probability of 1.5": ((Q, K, V), {"dropout_p": 1.5}),
    "is_causal in words": ((Q, K, V), {"is_causal": "no"}),
    "enable_gqa as a number": ((Q, K, V), {"enable_gqa": 1}),
    "no tensor": ((None, K, V), {}),
    "a scale in words": ((Q, K, V), {"scale": "x"}),
}
BOTH: dict[str, Arguments] = {
    "a mask and is_causal": ((Q, K, K, torch.rand(8, 9) > 0.3), {"is_causal": True}),
    "an added mask and is_causal": ((Q, K, K, torch.randn(8, 9)), {"is_causal": True}),
}
try:
    F.scaled_dot_product_attention(Q, K, K, torch.zeros(8, 9), is_causal=True)
except RuntimeError:  # from 2.14 on
    REFUSED.update(BOTH)
else:
    SERVED.update(BOTH)


def same(ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(3)
    got = ours()
    torch.manual_seed(3)
    want = theirs()
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    if got.device.type != "meta":
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", [*SERVED, *ORDINARY])
def test_what_pytorch_serves_is_served_with_the_same_bits(case: str) -> None:
    arguments, options = (SERVED | ORDINARY)[case]
    for _ in range(2):
        same(
            lambda: fm.scaled_dot_product_attention(*arguments, **options),
            lambda: F.scaled_dot_product_attention(*arguments, **options),
        )


@pytest.mark.parametrize("case", SERVED)
def test_explain_says_that_pytorch_serves_it_and_why(case: str) -> None:
    arguments, options = SERVED[case]
    decision = fm.explain(*arguments, **options)
    assert (decision.kernel, decision.basis) == ("sdpa", "required")
    assert "no kernel of ours takes" in decision.reason


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", [fm.scaled_dot_product_attention, fm.explain], ids=["call", "explain"])
def test_what_pytorch_refuses_is_refused_in_one_line(case: str, function: Callable[..., object]) -> None:
    arguments, options = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)):
        F.scaled_dot_product_attention(*arguments, **options)
    with pytest.raises((TypeError, ValueError)) as refusal:
        function(*arguments, **options)
    assert "\n" not in str(refusal.value)
    assert " it must " in str(refusal.value) or " they must " in str(refusal.value) or " must divide " in str(refusal.value)


@pytest.mark.parametrize("case", SERVED)
def test_a_kernel_asked_for_by_name_is_never_passed_over(case: str) -> None:
    arguments, options = SERVED[case]
    with pytest.raises((TypeError, ValueError)):
        fm.scaled_dot_product_attention(*arguments, **options, kernel="sdpa_math" if "dropout" in case else "fwd_triton")


def test_gradients_pass_through_what_pytorch_serves() -> None:
    q, k, v = (one[0].clone().requires_grad_() for one in (Q, K, V))
    fm.scaled_dot_product_attention(q, k, v).sum().backward()
    assert all(one.grad is not None for one in (q, k, v))


@pytest.mark.parametrize("case", ["3-D", "fp64", "a batch that broadcasts", *sorted(BOTH.keys() & SERVED.keys())])
def test_compile_serves_it_too(case: str) -> None:
    torch._dynamo.reset()
    arguments, options = SERVED[case]
    compiled = torch.compile(fm.scaled_dot_product_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments, **options), F.scaled_dot_product_attention(*arguments, **options))


EMPTY = {
    "batch 0": (Q[:0], K[:0], V[:0]),
    "no queries": (Q[:, :, :0], K, V),
    "no keys": (Q, K[:, :, :0], V[:, :, :0]),
    "no heads": (Q[:, :0], K[:, :0], V[:, :0]),
    "no keys, grouped": (Q, K[:, :2, :0], V[:, :2, :0]),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_compute_is_zeros_in_every_function(case: str, causal: bool) -> None:
    q, k, v = EMPTY[case]
    shape = (*q.shape[:3], v.shape[3])
    assert torch.equal(fm.flash_attention_science(q, k, v, causal), torch.zeros(shape))
    lse = torch.zeros(q.shape[:3])
    assert torch.equal(fm.flash_attention_forward(q, k, v, lse, causal, None), torch.zeros(shape))
    assert torch.equal(lse, torch.full(q.shape[:3], -torch.inf))
    result = fm.flash_attn_func(*(one.transpose(1, 2) for one in (q, k, v)), causal=causal, return_attn_probs=True)
    assert isinstance(result, tuple)
    assert torch.equal(result[0].transpose(1, 2), torch.zeros(shape))
    leaf = q.clone().requires_grad_()
    fm.flash_attention_science(leaf, k, v, causal).sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()
