"""The operators of attention with modes: what torch.library, torch.compile and autograd ask of them; and their fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.serving_reference import Row, sequence_attention

import flashmoe_science as fm
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.modes_spec import ModesSpec, modes_of
from flashmoe_science.ops.attention.front import append_op, modes_calls
from flashmoe_science.ops.attention.front.modes_op import attend_modes
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import PLAIN, Extras, Modes


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operator_arguments(extras: Extras, **modes: Any) -> tuple[object, ...]:
    e = extras
    return (
        "causal", modes.get("left"), modes.get("right"), e.cu_seqlens_q, e.cu_seqlens_k, e.cache_seqlens, e.page_table,
        e.cache_batch_idx, e.leftpad, e.max_seqlen_q, e.max_seqlen_k, e.softcap, e.sinks, e.alibi_slopes, e.bias, e.prefix,
        e.k_scale, e.v_scale, None, True,
    )  # fmt: skip


Q, K = randn(2, 4, 3, 8), randn(2, 2, 9, 8, seed=1)
CALLS: dict[str, tuple[torch.Tensor, torch.Tensor, Extras]] = {
    "equal": (Q, K, Extras(softcap=2.0, sinks=randn(4))),
    "bias": (Q, K, Extras(bias=randn(2, 4, 3, 9))),
    "ragged": (Q, K, Extras(cache_seqlens=i32(4, 9), leftpad=i32(1, 0), alibi_slopes=randn(2, 4).abs())),
    "paged": (Q, K.new_ones(6, 2, 4, 8), Extras(cache_seqlens=i32(4, 7), page_table=i32(0, 3, 5, 2).view(2, 2))),
    "packed": (
        randn(1, 4, 6, 8),
        randn(1, 2, 9, 8),
        Extras(i32(0, 2, 6), i32(0, 4, 9), max_seqlen_q=4, max_seqlen_k=5, prefix=i32(1, 3)),
    ),
}


@pytest.mark.parametrize(
    ("case", "grad"),
    [
        *((case, False) for case in CALLS),
        pytest.param("ragged", True, marks=pytest.mark.slow),
        *(pytest.param(case, True, marks=[pytest.mark.slow, pytest.mark.again]) for case in CALLS if case != "ragged"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch's own checks
def test_opcheck(case: str, grad: bool) -> None:
    q, k, extras = CALLS[case]
    q, k = (one.clone().requires_grad_(grad) for one in (q, k))
    arguments = (q, k, k.detach().clone(), *operator_arguments(extras, left=5))
    torch.library.opcheck(torch.ops.flashmoe.attention_modes.default, arguments)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_opcheck_of_an_append(rotary: bool) -> None:
    tables = (randn(9, 8), randn(9, 8)) if rotary else (None, None)
    caches, new = [randn(2, 2, 9, 16, seed=s) for s in (1, 2)], [randn(2, 2, 1, 16, seed=s) for s in (3, 4)]
    arguments = (*caches, *new, randn(2, 4, 1, 16), i32(3, 8), None, i32(1, 0), None, None, *tables)
    torch.library.opcheck(torch.ops.flashmoe.kv_cache_append.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_decode_with_append_compiles_whole(backend: str) -> None:
    torch._dynamo.reset()
    cos, sin = randn(20, 8), randn(20, 8, seed=1)

    def step(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor) -> Any:
        return fm.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, None, cos, sin, lengths, causal=True, window_size=(6, 0), softcap=4.0,
            return_softmax_lse=True,
        )  # fmt: skip

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    q, new = randn(2, 1, 4, 16), randn(2, 1, 2, 16, seed=3)
    for lengths in (i32(3, 0), i32(4, 11)):
        eager, traced = ([randn(2, 12, 2, 16, seed=s) for s in (5, 6)] for _ in range(2))
        expected, found = step(q, *eager, new, lengths), compiled(q, *traced, new, lengths)
        for a, b in zip((*expected, *eager), (*found, *traced), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_sequences_compile_whole_and_have_gradients(backend: str) -> None:
    torch._dynamo.reset()
    cu = i32(0, 2, 7)

    def loss(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = fm.flash_attn_varlen_func(q, kv, kv, cu, cu, 5, 5, causal=True, alibi_slopes=torch.ones(4))
        assert isinstance(out, torch.Tensor)
        return out.square().sum()

    def gradients(function: Any) -> list[torch.Tensor]:
        q, kv = randn(7, 4, 16).requires_grad_(), randn(7, 2, 16, seed=1).requires_grad_()
        function(q, kv).backward()
        assert q.grad is not None
        assert kv.grad is not None
        return [q.grad, kv.grad]

    for a, b in zip(gradients(loss), gradients(torch.compile(loss, backend=backend, fullgraph=True)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_one_graph_serves_other_sizes() -> None:
    torch._dynamo.reset()

    def attend(q: torch.Tensor, kv: torch.Tensor, cu: torch.Tensor, longest: int) -> Any:
        return fm.flash_attn_varlen_func(q, kv, kv, cu, cu, longest, longest, causal=True, softcap=2.0)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for total in (7, 12, 30):
        arguments = (randn(total, 4, 16), randn(total, 2, 16, seed=1), i32(0, total // 2, total), total - total // 2)
        assert torch.equal(compiled(*arguments), attend(*arguments))


def test_a_call_that_was_found_is_found_again_and_keeps_no_tensor() -> None:
    modes_calls.CALLS.clear()
    k_cache = randn(2, 9, 4, 16)
    for length in range(1, 9):  # a cache that grows
        fm.flash_attn_with_kvcache(randn(2, 1, 4, 16), k_cache, k_cache, cache_seqlens=i32(length, length))
    assert len(modes_calls.CALLS) == 1
    import gc

    held = gc.get_referents(*modes_calls.CALLS, *modes_calls.CALLS.values())
    assert not any(isinstance(one, torch.Tensor) for one in held)


def test_records_choose_the_kernel_and_its_config() -> None:
    pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")
    entries = [one for one in committed_table().entries if getattr(one.problem, "modes", PLAIN) != PLAIN]
    assert len(entries) > 20
    for entry in entries:
        problem, gpu = entry.problem, gpu_named(entry.gpu)
        assert isinstance(problem, AttentionProblem)
        able = [one for one in modes_calls._kernels() if one.cannot(problem, gpu) is None]
        found = modes_calls._choice(problem, gpu, able, ModesSpec("full"))
        assert (found.kernel, found.config, found.basis) == (entry.kernel, entry.config, "measured")
        named = [one for one in able if one.name == "split_triton"]
        asked = modes_calls._choice(problem, gpu, named, ModesSpec("full", kernel="split_triton"))
        assert (asked.kernel, asked.basis) == ("split_triton", "requested")


def test_an_explicit_request_never_falls_back() -> None:
    extras = Extras(softcap=3.0)
    with pytest.raises(ValueError, match="kernel is 'x'; it must be one of"):
        attend_modes(Q, K, K, modes_of(K, extras), extras, kernel="x")
    with pytest.raises(CannotServe, match="'fwd_triton' cannot serve this call: it takes no modes; 'sdpa' can"):
        attend_modes(Q, K, K, modes_of(K, extras), extras, kernel="fwd_triton")
    with pytest.raises(CannotServe, match="requires gradients"):
        attend_modes(Q.clone().requires_grad_(), K, K, modes_of(K, extras), extras, kernel="fwd_triton")
    by_name, _ = attend_modes(Q, K, K, modes_of(K, extras), extras, kernel="sdpa")
    assert torch.equal(by_name, attend_modes(Q, K, K, modes_of(K, extras), extras)[0])


def test_modes_and_tensors_must_agree() -> None:
    with pytest.raises(ValueError, match=r"modes.softcap is False, and the tensors given make it True; they must agree"):
        attend_modes(Q, K, K, Modes(window_left=1), Extras(softcap=3.0))
    with pytest.raises(ValueError, match=r"modes.lengths is 'packed', and the tensors given make it 'equal'"):
        attend_modes(Q, K, K, Modes(lengths="packed"), Extras())
    with pytest.raises(ValueError, match="window_left is -1; it must be at least 0"):
        attend_modes(Q, K, K, Modes(window_left=-1), Extras())
    with pytest.raises(ValueError, match="prefix is given and the mask is 'full'; it must be 'causal'"):
        attend_modes(Q, K, K, Modes(prefix=1), Extras(prefix=i32(1, 2)))


@pytest.mark.parametrize("kind", ["boolean", "additive", "prefix"])
def test_biases_and_prefixes_of_equal_lengths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.ops.attention.front import modes_fallback

    bias = randn(2, 1, 3, 9, seed=4)
    bias = (bias > 0 if kind == "boolean" else torch.where(bias > 1.5, -torch.inf, bias)).expand(2, 4, 3, 9)
    extras = Extras(prefix=i32(8, 0), sinks=randn(4)) if kind == "prefix" else Extras(bias=bias, softcap=2.0)
    mask = "causal" if kind == "prefix" else "full"
    whole = attend_modes(Q, K, K, modes_of(K, extras, 2), extras, mask=mask, return_lse=True)
    monkeypatch.setattr(modes_fallback, "_SCORES_AT_ONCE", 100)  # in pieces of a row
    for out, lse in (whole, attend_modes(Q, K, K, modes_of(K, extras, 2), extras, mask=mask, return_lse=True)):
        assert lse is not None
        for i in range(2):
            q, k = Q[i].transpose(0, 1), K[i].transpose(0, 1)
            if kind == "prefix":
                asked = Row(True, (2, -1), prefix=(8, 0)[i])
                expected, of_lse = sequence_attention(q, k, k, asked, sinks=extras.sinks)
            else:
                expected, of_lse = sequence_attention(q, k, k, Row(window=(2, -1), softcap=2.0), bias=bias[i])
            torch.testing.assert_close(out[i].transpose(0, 1).double(), expected, rtol=0, atol=5e-6)
            torch.testing.assert_close(lse[i].double(), of_lse, rtol=0, atol=5e-6)


def test_nothing_to_attend_gives_zeros() -> None:
    none = Extras(i32(0, 0, 0), i32(0, 0, 0), max_seqlen_q=0, max_seqlen_k=0)
    empty, k = Q.new_empty(1, 4, 0, 8), K[:1, :, :0]
    out, lse = attend_modes(empty, k, k, modes_of(k, none), none, return_lse=True)
    assert out.shape == (1, 4, 0, 8)
    assert lse is not None
    assert lse.shape == (1, 4, 0)
    rows = Extras(i32(0, 2, 3), i32(0, 0, 0), max_seqlen_q=2, max_seqlen_k=0)
    out, lse = attend_modes(Q[:1], k, k, modes_of(k, rows), rows, return_lse=True)
    assert torch.all(out == 0.0)
    assert lse is not None
    assert torch.all(lse == -torch.inf)


def test_the_append_is_refused_no_argument_that_its_kernel_would_misread() -> None:
    caches = [randn(2, 2, 9, 16) for _ in range(2)]
    with pytest.raises(ValueError, match=r"v has \(batch, heads, tokens, head_dim\) "):
        append_op.append_to_cache(*caches, randn(2, 2, 1, 16), randn(2, 2, 2, 16), randn(2, 4, 1, 16), i32(1, 2))
