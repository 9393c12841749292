"""Attention by PyTorch's operators gives one result on each way: each sequence by itself, padded with a mask, by scores."""

from __future__ import annotations

import pytest
import torch
from tests.unit.tensors import i32, randn

from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front import padded, pytorch
from flashmoe_science.ops.attention.front.pytorch import pytorch_attention

E4M3 = torch.float8_e4m3fn
LENGTHS_Q, LENGTHS_K, HELD = i32(0, 4, 4, 9), i32(0, 7, 7, 10), i32(6, 0, 3)
Q, K, V = randn(1, 4, 11, 16), randn(1, 2, 12, 16, seed=1), randn(1, 2, 12, 24, seed=2)
CACHE = (randn(5, 2, 8, 16, seed=3), randn(5, 2, 8, 24, seed=4))
PAGES = (randn(9, 2, 4, 16, seed=5), randn(9, 2, 4, 24, seed=6))
TABLE = i32(8, 0, 3, 3, 1, 7).view(3, 2)
LONGEST = Options(max_seqlen_q=5, max_seqlen_k=7)
ROWS = randn(3, 4, 2, 16, seed=7)
EIGHT, SCALES = [one.to(E4M3) for one in PAGES], randn(2, 3, 2, seed=8).abs()
SLOPES = randn(3, 4, seed=8).abs()

CASES: dict[str, tuple[Tensors, Options]] = {
    "packed": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K), LONGEST),
    "causal": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K), LONGEST._replace(mask="causal")),
    "window": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K), LONGEST._replace(window_left=2, window_right=1)),
    "used keys": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K, HELD), LONGEST._replace(mask="causal")),
    "slopes": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K, alibi_slopes=SLOPES), LONGEST),
    "cap and sinks": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K, sinks=randn(4, seed=9)), LONGEST._replace(softcap=2.0)),
    "chunks": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K, bias=(randn(3, 1, 5, 7) > 0).expand(3, 4, 5, 7)), LONGEST),
    "negative scale": (Tensors(Q, K, V, LENGTHS_Q, LENGTHS_K), LONGEST._replace(mask="causal")),
    "cache": (Tensors(ROWS, *CACHE, cache_seqlens=HELD), Options("causal")),
    "cache of rows": (Tensors(ROWS, *CACHE, cache_seqlens=HELD, cache_batch_idx=i32(4, 4, 0)), Options()),
    "left padding": (Tensors(ROWS, *CACHE, cache_seqlens=HELD, leftpad=i32(2, 0, 1)), Options("causal", window_left=3)),
    "prefix": (Tensors(ROWS, *CACHE, cache_seqlens=HELD, leftpad=i32(2, 0, 1), prefix=i32(4, 0, 1)), Options("causal")),
    "bias": (Tensors(ROWS, *CACHE, cache_seqlens=HELD, bias=randn(3, 4, 2, 8, seed=9)), Options("causal")),
    "pages": (Tensors(ROWS, *PAGES, cache_seqlens=HELD, page_table=TABLE), Options("causal")),
    "packed, pages": (Tensors(Q, *PAGES, LENGTHS_Q, None, HELD, TABLE), LONGEST._replace(window_left=3)),
    "e4m3": (Tensors(ROWS, *EIGHT, cache_seqlens=HELD, page_table=TABLE, k_scale=SCALES[0], v_scale=SCALES[1]), Options()),
}  # fmt: skip


def gradients(tensors: Tensors, options: Options, scale: float | None) -> list[torch.Tensor]:
    """The result, and the gradients of all that has one."""
    floating = {
        name: one.clone().requires_grad_()
        for name, one in tensors._asdict().items()
        if one is not None and one.dtype == torch.float32 and name not in ("alibi_slopes", "bias", "k_scale", "v_scale")
    }
    out, lse = pytorch_attention(tensors._replace(**floating), options, scale)
    out.square().sum().backward()
    found = [out.detach(), *(one.grad for one in floating.values() if one.grad is not None)]
    assert len(found) == 1 + len(floating)
    return found if lse is None else [*found, lse]


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_all_ways_give_one_result(case: str, lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = CASES[case]
    options, scale = options._replace(return_lse=lse), (-0.3 if case == "negative scale" else None)
    monkeypatch.setattr(pytorch, "_is_cheaper_alone", lambda *given: False)
    monkeypatch.setattr(padded, "_is_pytorchs_own", lambda *given: False)
    right = gradients(tensors, options, scale)
    monkeypatch.undo()
    ways = [gradients(tensors, options, scale)]
    for cheaper in (False, True):
        monkeypatch.setattr(pytorch, "_is_cheaper_alone", lambda *given, cheaper=cheaper: cheaper)
        ways.append(gradients(tensors, options, scale))
    for way in ways:
        for got, want in zip(way, right, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=5e-6)


def nodes(tensor: torch.Tensor) -> set[str]:
    """The names of the gradient's operators."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [one for one, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_and_packed_sequences_are_pytorchs_own_attention(dtype: torch.dtype) -> None:
    """Its fused operator takes a fifth of the time of scores, and keeps none of them for the gradient."""
    q = randn(1, 4, 300, 16).to(dtype).requires_grad_()
    starts = i32(0, 250, 300)
    for tensors, options in (
        (Tensors(q, q, q), Options("causal", window_left=20)),
        (Tensors(q, q, q, alibi_slopes=SLOPES[:1]), Options("causal")),
        (Tensors(q, q, q, starts, starts), Options("causal", max_seqlen_q=250, max_seqlen_k=250)),
        (Tensors(q, q, q, starts, starts), Options(window_left=20, max_seqlen_q=250, max_seqlen_k=250)),
    ):
        out, _ = pytorch_attention(tensors, options, None)
        assert "ScaledDotProductFlashAttentionForCpuBackward0" in nodes(out)


def test_many_short_sequences_are_padded() -> None:
    counts, heads = [8] * 500, 4
    assert not pytorch._is_cheaper_alone(pytorch._Spans(counts, [0] * 500, counts), heads)
    assert pytorch._is_cheaper_alone(pytorch._Spans([1000, 10], [0, 0], [1000, 10]), heads)


@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 4)])
def test_the_log_sum_exp_of_nothing_is_part_of_the_graph(queries: int, keys: int) -> None:
    """A loss of it alone would raise on the one rank whose sequence is empty."""
    q, k = randn(2, 4, queries, 8).requires_grad_(), randn(2, 2, keys, 8)
    out, lse = pytorch_attention(Tensors(q, k, k), Options(return_lse=True), None)
    assert lse is not None
    assert torch.equal(lse, torch.full((2, 4, queries), -torch.inf))
    for one in (out, lse):
        (gradient,) = torch.autograd.grad(one.sum(), q)
        assert torch.equal(gradient, torch.zeros_like(q))


def test_a_log_sum_exp_may_be_changed_in_place() -> None:
    q = randn(2, 4, 3, 16).requires_grad_()
    lse = pytorch_attention(Tensors(q, q, q), Options(return_lse=True), None)[1]
    assert lse is not None
    (right,) = torch.autograd.grad(2 * lse.sum(), q, retain_graph=True)
    assert torch.equal(torch.autograd.grad(lse.mul_(2).sum(), q)[0], right)
