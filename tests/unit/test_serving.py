"""The functions for serving on the CPU against plain attention in fp64, their signatures, and what they refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.serving_reference import Row, sequence_attention
from tests.unit.tensors import i32, randn

import flashmoe_science as fm
from flashmoe_science import flash_attn_varlen_func as varlen
from flashmoe_science import flash_attn_with_kvcache as with_cache

E4M3 = torch.float8_e4m3fn
NEAR = {"rtol": 0.0, "atol": 5e-6}


def starts(lengths: list[int]) -> torch.Tensor:
    return i32(0, *torch.tensor(lengths).cumsum(0).tolist())


# Packed sequences ------------------------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [3, 0, 5, 1, 4], [4, 3, 0, 9, 2]
VARLEN: dict[str, tuple[dict[str, Any], Row]] = {
    "full": ({}, Row()),
    "causal": ({"causal": True}, Row(causal=True)),
    "window": ({"window_size": (2, 1)}, Row(window=(2, 1))),
    "causal window": ({"causal": True, "window_size": (2, 5)}, Row(causal=True, window=(2, -1))),
    "softcap": ({"softcap": 1.5, "softmax_scale": 0.9}, Row(softcap=1.5)),
    "chunks": ({"attention_chunk": 3, "causal": True}, Row(causal=True, chunk=3)),
    "window in a tensor": ({"window_size": torch.tensor([1, 2])}, Row(window=(1, 2))),
    "no limit as None": ({"window_size": (None, 0)}, Row(window=(-1, 0))),
}


@pytest.mark.parametrize("case", list(VARLEN))
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_packed_sequences_are_attended_each_by_itself(case: str, sinks: bool, alibi: bool) -> None:
    options, asked = VARLEN[case]
    if alibi and asked.chunk:
        pytest.skip("refused")
    q, k, v = randn(sum(LENGTHS_Q), 4, 16), randn(sum(LENGTHS_K), 2, 16, seed=1), randn(sum(LENGTHS_K), 2, 24, seed=2)
    s_aux, slopes = (randn(4, seed=3) if sinks else None), (randn(4, seed=4).abs() if alibi else None)
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    result = varlen(q, k, v, cu_q, cu_k, 5, 9, s_aux=s_aux, alibi_slopes=slopes, return_attn_probs=True, **options)
    assert isinstance(result, tuple)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        out, lse = sequence_attention(q[a:b], k[c:d], v[c:d], asked, options.get("softmax_scale"), s_aux, slopes)
        torch.testing.assert_close(result[0][a:b].double(), out, **NEAR)
        torch.testing.assert_close(result[1][:, a:b].double(), lse, **NEAR)


def test_rows_that_are_not_used_take_no_part() -> None:
    used_q, used_k = [2, 0, 5, 0, 3], [4, 1, 0, 7, 2]
    q, k, v = randn(sum(LENGTHS_Q), 4, 16), randn(sum(LENGTHS_K), 4, 16, seed=1), randn(sum(LENGTHS_K), 4, 16, seed=2)
    cu_q, cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    result = varlen(q, k, v, cu_q, cu_k, 5, 9, i32(*used_q), i32(*used_k), causal=True, return_attn_probs=True)
    assert isinstance(result, tuple)
    for i, (n, m) in enumerate(zip(used_q, used_k, strict=True)):
        first, last = int(cu_q[i]), int(cu_q[i + 1])
        own_k, own_v = (one[int(cu_k[i]) : int(cu_k[i]) + m] for one in (k, v))
        out, lse = sequence_attention(q[first : first + n], own_k, own_v, Row(causal=True))
        torch.testing.assert_close(result[0][first : first + n].double(), out, **NEAR)
        torch.testing.assert_close(result[1][:, first : first + n].double(), lse, **NEAR)
        assert torch.all(result[0][first + n : last] == 0.0)


def test_packed_queries_read_keys_by_pages() -> None:
    lengths = [7, 0, 3, 12, 1]
    q, k_pages, v_pages = randn(sum(LENGTHS_Q), 4, 16), randn(20, 4, 2, 16, seed=1), randn(20, 4, 2, 16, seed=2)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:15].view(5, 3).int()
    used = -(-torch.tensor(lengths) // 4)
    garbage = torch.where(torch.arange(3) < used[:, None], table, 2**31 - 1).int()
    common, options = (q, k_pages, v_pages, starts(LENGTHS_Q)), {"causal": True, "block_table": garbage}
    by_lengths = varlen(*common, None, 5, 12, None, i32(*lengths), **options)
    by_starts = varlen(*common, starts(lengths), 5, 12, **options)
    assert torch.equal(by_lengths, by_starts)
    for i, length in enumerate(lengths):
        a, b = starts(LENGTHS_Q)[i : i + 2]
        own_k, own_v = (pages[table[i].long()].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        expected, _ = sequence_attention(q[a:b], own_k, own_v, Row(causal=True))
        torch.testing.assert_close(by_lengths[a:b].double(), expected, **NEAR)


def test_gradients_of_packed_sequences_are_those_of_each_by_itself() -> None:
    q, k, v = (randn(9, 4, 8, seed=seed).requires_grad_() for seed in range(3))
    sink = randn(4, seed=3).requires_grad_()
    cu = starts([4, 0, 5])
    varlen(q, k, v, cu, cu, 5, 5, causal=True, softcap=3.0, s_aux=sink).square().sum().backward()
    found = [one.grad for one in (q, k, v, sink)]
    for one in (q, k, v, sink):
        one.grad = None
    for a, b in ((0, 4), (4, 9)):
        scores = torch.einsum("ihd,jhd->hij", q[a:b], k[a:b]) * 8**-0.5
        scores = (3.0 * torch.tanh(scores / 3.0)).masked_fill(~torch.ones(b - a, b - a).bool().tril(), -torch.inf)
        weights = torch.cat((scores, sink[:, None, None].expand(4, b - a, 1)), -1).softmax(-1)[..., :-1]
        torch.einsum("hij,jhd->ihd", weights, v[a:b]).square().sum().backward()
    for got, one in zip(found, (q, k, v, sink), strict=True):
        torch.testing.assert_close(got, one.grad, rtol=1e-4, atol=1e-5)


# A cache ---------------------------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, positions: list[int], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, d] rotated by complex numbers."""
    half = cos.shape[1]
    out = x.clone().double()
    for token, position in enumerate(positions):
        turn = torch.complex(cos[position].double(), sin[position].double())
        a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
        value = torch.complex(x[token, :, a].double(), x[token, :, b].double()) * turn
        out[token, :, a], out[token, :, b] = value.real, value.imag
    return out


PAGED = ["contiguous", "batch_idx", "pages", "pages and batch_idx"]


@pytest.mark.parametrize("place", PAGED)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("rotary", ["none", "interleaved", "halves"])
@pytest.mark.parametrize("kind", ["full", "causal", "local", "chunks"])
def test_a_cache_grows_and_is_attended(place: str, packed: bool, leftpad: bool, rotary: str, kind: str) -> None:
    lengths, new, queries = [5, 0, 11], ([2, 1, 3] if packed else [2, 2, 2]), ([1, 3, 2] if packed else [3, 3, 3])
    pads = [3, 0, 1] if leftpad else [0, 0, 0]
    heads, heads_kv, width, capacity, page = 4, 2, 32, 16, 4
    q, k, v = (randn(sum(n), h, width, seed=s) for s, (n, h) in enumerate(((queries, heads), (new, heads_kv), (new, heads_kv))))
    index = [4, 0, 2] if "batch_idx" in place else [0, 1, 2]
    stored_k, stored_v = (randn(5, capacity, heads_kv, width, seed=s) for s in (5, 6))
    for i, row in enumerate(index):  # what lies past a length is garbage
        for stored in (stored_k, stored_v):
            stored[row, lengths[i] :] = torch.nan
    table = None
    k_cache, v_cache = stored_k.clone(), stored_v.clone()
    if "pages" in place:
        table = torch.randperm(24, generator=torch.Generator().manual_seed(7))[:20].view(5, 4).int()
        k_cache, v_cache = (torch.full((24, page, heads_kv, width), torch.nan) for _ in range(2))
        for cache, stored in ((k_cache, stored_k), (v_cache, stored_v)):
            cache[table.flatten().long()] = stored.view(20, page, heads_kv, width)
        if "batch_idx" not in place:
            table = table[:3].clone()
            table[1, 1:] = -7
    asked = {"full": Row(), "causal": Row(causal=True), "local": Row(window=(4, 1)), "chunks": Row(causal=True, chunk=5)}[kind]
    options: dict[str, Any] = {"causal": asked.causal, "window_size": asked.window, "attention_chunk": asked.chunk}
    cos, sin = randn(30, 8, seed=8), randn(30, 8, seed=9)
    if rotary != "none":
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"}
    if packed:
        options |= {"cu_seqlens_q": starts(queries), "cu_seqlens_k_new": starts(new), "max_seqlen_q": 3}
        arguments = (q, k_cache, v_cache, k, v)
    else:
        arguments = (q.view(3, 3, heads, width), k_cache, v_cache, k.view(3, 2, heads_kv, width), v.view(3, 2, heads_kv, width))
    seqlens = i32(*lengths)
    result = with_cache(
        *arguments, cache_seqlens=seqlens, page_table=table, cache_leftpad=i32(*pads) if leftpad else None,
        cache_batch_idx=i32(*index) if "batch_idx" in place else None, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert isinstance(result, tuple)
    assert seqlens.tolist() == lengths
    grown_k, grown_v = (
        cache if table is None else cache[table.clamp(min=0).long()].flatten(1, 2) for cache in (k_cache, v_cache)
    )
    for i, row in enumerate(index):
        at, of_q, of_k = lengths[i], slice(sum(queries[:i]), sum(queries[: i + 1])), slice(sum(new[:i]), sum(new[: i + 1]))
        own_q, own_k, own_v = q[of_q], k[of_k], v[of_k]
        if rotary != "none":
            places = [at + (j if kind != "full" else 0) for j in range(queries[i])]
            own_q = rotated(own_q, places, cos, sin, rotary == "interleaved").float()
            own_k = rotated(own_k, [at + j for j in range(new[i])], cos, sin, rotary == "interleaved").float()
        keys, values = torch.cat((stored_k[row, :at], own_k)), torch.cat((stored_v[row, :at], own_v))
        torch.testing.assert_close(grown_k[row, : at + new[i]], keys, **NEAR)
        torch.testing.assert_close(grown_v[row, : at + new[i]], values, rtol=0, atol=0)
        out, lse = sequence_attention(own_q, keys, values, Row(asked.causal, asked.window, 0.0, pads[i], asked.chunk))
        got = result[0][of_q] if packed else result[0][i]
        torch.testing.assert_close(got.double(), out, rtol=0, atol=2e-5)
        torch.testing.assert_close((result[1][:, of_q] if packed else result[1][i]).double(), lse, rtol=0, atol=2e-5)


def test_a_length_may_be_an_integer_or_left_out() -> None:
    q, k_cache, v_cache = randn(2, 1, 4, 16), randn(2, 9, 4, 16, seed=1), randn(2, 9, 4, 16, seed=2)
    by_tensor = with_cache(q, k_cache, v_cache, cache_seqlens=i32(9, 9))
    assert torch.equal(with_cache(q, k_cache, v_cache, cache_seqlens=9), by_tensor)
    torch.testing.assert_close(with_cache(q, k_cache, v_cache), by_tensor)
    torch.testing.assert_close(fm.flash_attn_func(q, k_cache, v_cache), by_tensor, rtol=0, atol=2e-6)
    assert torch.all(with_cache(q, k_cache, v_cache, cache_seqlens=0) == 0.0)


def test_an_e4m3_cache_is_read_by_its_scales_and_appended_to() -> None:
    q = randn(2, 1, 4, 16).bfloat16()
    k_cache, v_cache = (randn(2, 9, 2, 16, seed=s).to(E4M3) for s in (1, 2))
    k, v = (randn(2, 1, 2, 16, seed=s).to(E4M3) for s in (3, 4))
    k_scale, v_scale = randn(2, 2, seed=5).abs(), randn(2, 2, seed=6).abs()
    out = with_cache(q, k_cache, v_cache, k, v, cache_seqlens=i32(4, 8), k_descale=k_scale, v_descale=v_scale)
    assert out.dtype == torch.bfloat16
    for i, length in enumerate((5, 9)):
        assert torch.equal(k_cache[i, length - 1].float(), k[i, 0].float())
        keys = k_cache[i, :length].float() * k_scale[i, None, :, None]
        values = v_cache[i, :length].float() * v_scale[i, None, :, None]
        expected, _ = sequence_attention(q[i], keys, values, Row())
        torch.testing.assert_close(out[i].double(), expected, rtol=1e-2, atol=1e-2)
    # An e4m3 query too: its scale is that of the scores.
    q8, q_scale = q.to(E4M3), randn(2, 2, seed=7).abs()
    out = with_cache(q8, k_cache, v_cache, cache_seqlens=9, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)
    wide = (q8.float().view(2, 1, 2, 2, 16) * q_scale[:, None, :, None, None]).view(2, 1, 4, 16)
    expected = with_cache(wide, *(c.float() * s[:, None, :, None] for c, s in ((k_cache, k_scale), (v_cache, v_scale))))
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


def test_a_second_query_is_attended_against_the_values() -> None:
    q, qv, k, v = randn(6, 4, 16), randn(6, 4, 24, seed=1), randn(6, 2, 16, seed=2), randn(6, 2, 24, seed=3)
    out = varlen(q, k, v, starts([2, 4]), starts([2, 4]), 4, 4, causal=True, qv=qv)
    cached = with_cache(q[2:][None], k[2:][None], v[2:][None], qv=qv[2:][None], cache_seqlens=4, causal=True)
    wide_q, wide_k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    expected, _ = sequence_attention(wide_q[2:], wide_k[2:], v[2:], Row(causal=True))
    for found in (out[2:], cached[0]):
        torch.testing.assert_close(found.double(), expected, **NEAR)


def test_rotary_positions_may_be_given() -> None:
    q, k_cache, v_cache, k, v = (randn(2, n, 2, 16, seed=n) for n in (1, 8, 8, 1, 1))
    cos, sin = randn(9, 8, seed=3), randn(9, 8, seed=4)
    one, other = k_cache.clone(), k_cache.clone()
    with_cache(q, one, v_cache, k, v, None, cos, sin, i32(3, 5), rotary_seqlens=i32(1, 7), causal=True)
    assert torch.allclose(one[0, 3].double(), rotated(k[0], [1], cos, sin, True)[0], atol=1e-6)
    assert torch.allclose(one[1, 5].double(), rotated(k[1], [7], cos, sin, True)[0], atol=1e-6)
    other[0, 3], other[1, 5] = one[0, 3], one[1, 5]
    assert torch.equal(one, other)


def test_our_kernels_agree_with_pytorchs_operators_in_the_interpreter(interpreted: Interpreter) -> None:
    report = interpreted("interpreted_serving.py")
    # Not counted: plans; chunks, rows of a table and used rows, whose tensors are made anew at each call.
    assert report.pop("stored") == len(report) - 4
    assert 0 < report.pop("plans") < len(report)
    for case, found in report.items():
        assert found["same"], case
        assert found["difference"] < (1e-2 if case == "bf16" else 2e-6), case


# Other functions with features -----------------------------------------------------------------------------------------------


def test_flash_attn_func_takes_windows_caps_and_slopes() -> None:
    q, k, v, slopes = randn(2, 5, 4, 16), randn(2, 9, 2, 16, seed=1), randn(2, 9, 2, 24, seed=2), randn(2, 4, seed=3).abs()
    for options, asked in (
        ({"window_size": (3, 1)}, Row(window=(3, 1))),
        ({"causal": True, "window_size": (2, 2), "softcap": 2.0}, Row(True, (2, -1), 2.0)),
        ({"causal": True, "alibi_slopes": slopes}, Row(True)),
        ({"window_size": [-1, -1], "softcap": 0}, Row()),
    ):
        result = fm.flash_attn_func(q, k, v, return_attn_probs=True, **options)  # type: ignore[arg-type]
        assert isinstance(result, tuple)
        for i in range(2):
            given = slopes[i] if "alibi_slopes" in options else None
            out, lse = sequence_attention(q[i], k[i], v[i], asked, slopes=given)
            torch.testing.assert_close(result[0][i].double(), out, **NEAR)
            torch.testing.assert_close(result[1][i].double(), lse, **NEAR)


def test_the_module_that_stands_for_flash_attention_3s() -> None:
    from flashmoe_science.integrations import flash_attn_interface as module

    q, k, v = randn(2, 3, 4, 16), randn(2, 7, 2, 16, seed=1), randn(2, 7, 2, 300, seed=2)
    out, lse = module.flash_attn_func(q, k, v, causal=True, attention_chunk=4, num_splits=3, return_attn_probs=True)
    for i in range(2):
        expected, of_lse = sequence_attention(q[i], k[i], v[i], Row(True, chunk=4))
        torch.testing.assert_close(out[i].double(), expected, **NEAR)
        torch.testing.assert_close(lse[i].double(), of_lse, **NEAR)
    e4m3 = [one.to(E4M3) for one in (q, k, v[..., :16])]
    scales = [randn(2, 2, seed=s).abs() for s in (3, 4, 5)]
    wide = [
        one.float() * s.repeat_interleave(one.shape[2] // 2, 1)[:, None, :, None] for one, s in zip(e4m3, scales, strict=True)
    ]
    out = module.flash_attn_func(*e4m3, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), fm.flash_attn_func(*wide), rtol=1e-2, atol=1e-2)
    assert module.get_scheduler_metadata(2, 1, 9, 4, 2, 16, i32(1, 2), causal=True).numel() == 0
    assert module.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=3).shape == (2, 1, 4, 300)


@pytest.mark.parametrize("tokens", [(3, 0), (0, 3)])
def test_chunks_of_no_keys_and_of_no_queries(tokens: tuple[int, int]) -> None:
    rows, keys = tokens
    lengths = i32(0, rows), i32(0, keys)
    out, lse, *_ = fm.flash_attn_varlen_func(
        randn(rows, 4, 16), randn(keys, 2, 16, seed=1), randn(keys, 2, 16, seed=2), *lengths, rows, keys,
        causal=True, attention_chunk=4, return_attn_probs=True,
    )  # fmt: skip
    torch.testing.assert_close(out, torch.zeros(rows, 4, 16))
    torch.testing.assert_close(lse, torch.full((4, rows), -torch.inf))


def test_parts_of_an_attention_are_combined() -> None:
    from flashmoe_science.integrations.flash_attn_interface import flash_attn_combine

    parts, lses = randn(3, 2, 5, 4, 8), randn(3, 2, 5, 4, seed=1)
    lses[1, 0], lses[:, 1, 2] = -torch.inf, -torch.inf
    parts[1, 0] = torch.nan  # of an empty part nothing is read
    out, lse = flash_attn_combine(parts, lses, out_dtype=torch.float16)
    assert out.dtype == torch.float16
    weights = lses.softmax(0).nan_to_num(0.0).unsqueeze(-1)
    torch.testing.assert_close(out.float(), (weights * parts.nan_to_num(0.0)).sum(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, lses.logsumexp(0))
    assert torch.all(lse[1, 2] == -torch.inf)
    for given, what in (
        ((parts, lses[..., :1]), r"out_partial has shape \(3, 2, 5, 4, 8\) and lse_partial \(3, 2, 5, 1\); they must be"),
        ((parts[:0], lses[:0]), "with at least one split"),
        ((parts, lses.int()), "lse_partial has dtype torch.int32; it must be torch.float32"),
        ((parts, lses, randn(7, 2, 5, 4, 8)), r"out has shape \(7, 2, 5, 4, 8\); it must be \(2, 5, 4, 8\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=what):
            flash_attn_combine(*given)


# Signatures and refusals -----------------------------------------------------------------------------------------------------


def test_the_signatures_are_flash_attention_3s_with_keywords_behind() -> None:
    ours = {"block_table", "alibi_slopes", "s_aux", "kernel"}
    for function, more, expected in (
        (varlen, {"dropout_p"}, (
         "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale "
         "k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
        )),
        (with_cache, set(), (
         "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q "
         "cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size "
         "attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
        )),
    ):  # fmt: skip
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == expected.split()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == ours | more


Q, C = randn(2, 3, 4, 16), randn(2, 8, 4, 16)
P, CU = randn(6, 4, 16), i32(0, 2, 6)


def packed(**changes: Any) -> object:
    arguments = {"q": P, "k": P, "v": P, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}
    return varlen(**(arguments | changes))


def cached(**changes: Any) -> object:
    return with_cache(**({"q": Q, "k_cache": C, "v_cache": C, "cache_seqlens": i32(4, 5)} | changes))


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: packed(q=None), TypeError, "q is a NoneType; it must be a torch.Tensor"),
    (lambda: packed(q=Q), ValueError, "q has 4 dimensions; it must have 3 (tokens, heads, head_dim)"),
    (lambda: packed(v=P.half()), TypeError, "v has dtype torch.float16 and q has torch.float32"),
    (lambda: packed(k=P[:, :3], v=P[:, :3]), ValueError, "k has 3 heads and q has 4; the first must divide the second"),
    (lambda: packed(cu_seqlens_q=CU.long()), TypeError, "cu_seqlens_q has dtype torch.int64; it must be torch.int32"),
    (lambda: packed(cu_seqlens_q=None), TypeError, "cu_seqlens_q is None; it must be an int32 tensor"),
    (lambda: packed(cu_seqlens_k=CU[:2]), ValueError, "cu_seqlens_k has shape (2,); it must be (3,)"),
    (lambda: packed(cu_seqlens_k=None), ValueError, "cu_seqlens_k is None, and so is seqused_k; packed queries need one"),
    (lambda: packed(max_seqlen_q=2.5), TypeError, "max_seqlen_q is 2.5; it must be an integer"),
    (lambda: packed(max_seqlen_k=-1), ValueError, "max_seqlen_k is -1; it must be at least 0"),
    (lambda: packed(seqused_q=i32(1)), ValueError, "seqused_q has shape (1,); it must be (2,)"),
    (lambda: packed(seqused_q="2"), TypeError, "seqused_q is a str; it must be a torch.Tensor or None"),
    (lambda: packed(qv=P[:2]), ValueError, "qv has shape (2, 4, 16); it must have q's, with the width of v: (6, 4, 16)"),
    (lambda: packed(qv=P.half()), TypeError, "qv is torch.float16 on cpu; it must be as q, torch.float32 on cpu"),
    (lambda: packed(causal="no"), TypeError, "causal is 'no'; it must be True or False"),
    (lambda: packed(window_size=3), TypeError, "window_size is 3; it must be two integers"),
    (lambda: packed(window_size=(1, 2.5)), TypeError, "window_size is (1, 2.5); it must be two integers"),
    (lambda: packed(softcap=-1.0), ValueError, "softcap is -1.0; it must be finite and at least 0.0"),
    (lambda: packed(softcap="x"), TypeError, "softcap is 'x'; it must be a real number"),
    (lambda: packed(softmax_scale=float("inf")), ValueError, "softmax_scale is inf; it must be finite"),
    (lambda: packed(attention_chunk=-2), ValueError, "attention_chunk is -2; it must be at least 0"),
    (lambda: packed(attention_chunk=2, alibi_slopes=randn(4)), ValueError, "attention_chunk is 2 and alibi_slopes are given"),
    (lambda: packed(alibi_slopes=randn(3)), ValueError, "alibi_slopes has shape (2, 3); it must be (2, 4)"),
    (lambda: packed(alibi_slopes=0.5), TypeError, "alibi_slopes is a float; it must be a torch.Tensor"),
    (lambda: packed(s_aux=randn(3)), ValueError, "s_aux has shape (3,); it must be (4,)"),
    (lambda: packed(s_aux=randn(1).expand(4)), ValueError, "s_aux has stride 0 in its last dimension; it must be contiguous"),
    (lambda: packed(k_descale=randn(2, 4)), ValueError, "k_descale is given and k has dtype torch.float32; it is for"),
    (lambda: packed(q_descale=randn(2, 4)), ValueError, "q_descale is given and q has dtype torch.float32; it is for"),
    (lambda: packed(num_splits=-1), ValueError, "num_splits is -1; it must be at least 0"),
    (lambda: packed(num_splits=1000), ValueError, "num_splits is 1000; it must be from 0 to 256"),
    (lambda: packed(kernel="fastest"), ValueError, "kernel is 'fastest'; it must be one of"),
    (lambda: packed(kernel="fwd_triton"), ValueError, "kernel 'fwd_triton' cannot serve attn b2 h4 q4 d16"),
    (lambda: cached(q=P), ValueError, "q has 3 dimensions; it must have 4 (batch, tokens, heads, head_dim)"),
    (lambda: cached(k_cache=C[:1], v_cache=C[:1]), ValueError, "k_cache has 1 sequences and q has 2; it must have at least"),
    (lambda: cached(v_cache=C[:, :7]), ValueError, "v_cache has sequence length 7 and k_cache has 8"),
    (lambda: cached(cache_seqlens="4"), TypeError, "cache_seqlens is '4'; it must be an integer, a torch.Tensor or None"),
    (lambda: cached(cache_seqlens=-1), ValueError, "cache_seqlens is -1; it must be at least 0"),
    (lambda: cached(cache_seqlens=i32(1, 2, 3)), ValueError, "cache_seqlens has shape (3,); it must be (2,)"),
    (lambda: cached(cache_leftpad=i32(1)), ValueError, "cache_leftpad has shape (1,); it must be (2,)"),
    (lambda: cached(page_table=i32(1, 2)), ValueError, "page_table has shape (2,); it must be (2, any)"),
    (lambda: cached(page_table=CU[None], block_table=CU[None]), ValueError, "page_table and block_table are given"),
    (lambda: cached(k=Q), ValueError, "v is None and k is given; new keys and values go together"),
    (lambda: cached(rotary_cos=randn(9, 8), rotary_sin=randn(9, 8)), ValueError, "k is None and rotary_cos is given; new keys"),
    (lambda: cached(k=Q, v=Q, rotary_cos=randn(9, 8)), ValueError, "rotary_cos and rotary_sin: one is given"),
    (lambda: cached(k=Q, v=Q, rotary_cos=randn(9, 9), rotary_sin=randn(9, 9)), ValueError, "rotary_cos rotates 18 dimensions"),
    (lambda: cached(k=Q, v=Q, rotary_cos=randn(9, 8), rotary_sin=randn(8, 9).t()), ValueError, "rotary_sin has stride 9 in"),
    (lambda: cached(k=Q, v=Q, cache_seqlens=None), ValueError, "k and v are given without cache_seqlens"),
    (lambda: cached(k=Q.half(), v=Q.half()), TypeError, "k has dtype torch.float16 and k_cache has torch.float32"),
    (lambda: cached(k=Q[:, :, :3], v=Q[:, :, :3]), ValueError, "k has (batch, heads, tokens, head_dim) (2, 3, 3, 16)"),
    (lambda: cached(k=Q, v=Q, k_cache=C.clone().requires_grad_()), ValueError, "k_cache requires gradients; it is written"),
    (lambda: cached(k=Q.clone().requires_grad_(), v=Q), ValueError, "k requires gradients, and an append has none: call it"),
    (lambda: cached(q=P, cu_seqlens_q=CU), ValueError, "cu_seqlens_q is given without max_seqlen_q"),
    (lambda: cached(return_softmax_lse=1), TypeError, "return_softmax_lse is 1; it must be True or False"),
    (lambda: cached(k_cache=C.mT.contiguous().mT), ValueError, "k_cache has stride 4 in its last dimension"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "what"), REFUSED, ids=[what[:48] for _, _, what in REFUSED])
def test_it_is_refused_in_one_line(call: Callable[[], object], kind: type[Exception], what: str) -> None:
    for _ in range(2):  # a refusal leaves nothing behind that would let the second call through
        with pytest.raises(kind) as refusal:
            call()
        assert str(refusal.value).startswith(what), refusal.value
        assert "\n" not in str(refusal.value)
