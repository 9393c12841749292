"""The operator with features: what torch.library, torch.compile and autograd ask of it; and its fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.serving_reference import Row, sequence_attention
from tests.unit.tensors import i32, randn

import flashmoe_science as fm
from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front import padded
from flashmoe_science.ops.attention.front.append import append_to_cache
from flashmoe_science.ops.attention.front.kernels import ours
from flashmoe_science.ops.attention.front.operator import attend
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.calls import LAUNCHES


def operator_arguments(tensors: Tensors, options: Options) -> tuple[object, ...]:
    o = options
    of_window = (o.window_left, o.window_right, o.softcap, o.num_splits, o.max_seqlen_q, o.max_seqlen_k)
    return (*tensors[:3], "causal", None, True, None, *tensors.of_features(), *of_window)


Q, K = randn(2, 4, 3, 8), randn(2, 2, 9, 8, seed=1)
PACKED = (randn(1, 4, 6, 8), randn(1, 2, 9, 8), randn(1, 2, 9, 8, seed=2))
CALLS: dict[str, tuple[Tensors, Options]] = {
    "equal": (Tensors(Q, K, K, sinks=randn(4)), Options(softcap=2.0)),
    "bias": (Tensors(Q, K, K, bias=randn(2, 4, 3, 9)), Options()),
    "ragged": (
        Tensors(Q, K, K, cache_seqlens=i32(4, 9), leftpad=i32(1, 0), alibi_slopes=randn(2, 4).abs()),
        Options(),
    ),
    "paged": (
        Tensors(Q, *(K.new_ones(6, 2, 4, 8),) * 2, cache_seqlens=i32(4, 7), page_table=i32(0, 3, 5, 2).view(2, 2)),
        Options(),
    ),
    "packed": (
        Tensors(*PACKED, i32(0, 2, 6), i32(0, 4, 9), prefix=i32(1, 3)),
        Options(max_seqlen_q=4, max_seqlen_k=5),
    ),
}


@pytest.mark.parametrize(
    ("case", "grad"),
    [
        *((case, False) for case in CALLS),
        pytest.param("ragged", True, marks=pytest.mark.slow),
        *(pytest.param(case, True, marks=[pytest.mark.slow, pytest.mark.redundant]) for case in ("equal", "bias", "packed")),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch's own checks
def test_opcheck(case: str, grad: bool) -> None:
    tensors, options = CALLS[case]
    q, k = (one.clone().requires_grad_(grad) for one in (tensors.q, tensors.k))
    tensors = tensors._replace(q=q, k=k, v=tensors.v.clone())
    arguments = operator_arguments(tensors, options._replace(window_left=5))
    torch.library.opcheck(torch.ops.flashmoe.attention_forward.default, arguments)


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


def test_windows_of_other_sizes_compile_whole_and_have_gradients() -> None:
    torch._dynamo.reset()

    def window(q: torch.Tensor) -> Any:
        return fm.flash_attn_func(q, q, q, causal=True, window_size=(3, 0))

    compiled = torch.compile(window, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (8, 11):
        q = randn(2, tokens, 4, 16).requires_grad_()
        eager, traced = (torch.autograd.grad(function(q).square().sum(), q)[0] for function in (window, compiled))
        torch.testing.assert_close(traced, eager)


@pytest.mark.slow
def test_one_graph_serves_other_sizes() -> None:
    torch._dynamo.reset()

    def attend(q: torch.Tensor, kv: torch.Tensor, cu: torch.Tensor, longest: int) -> Any:
        return fm.flash_attn_varlen_func(q, kv, kv, cu, cu, longest, longest, causal=True, softcap=2.0)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for total in (7, 12, 30):
        arguments = (randn(total, 4, 16), randn(total, 2, 16, seed=1), i32(0, total // 2, total), total - total // 2)
        assert torch.equal(compiled(*arguments), attend(*arguments))


def test_a_stored_launch_keeps_no_tensor() -> None:
    LAUNCHES.clear()
    k_cache = randn(2, 9, 4, 16)
    for length in range(1, 9):  # a cache that grows
        fm.flash_attn_with_kvcache(randn(2, 1, 4, 16), k_cache, k_cache, cache_seqlens=i32(length, length))
    assert len(LAUNCHES) == 1
    import gc

    held = gc.get_referents(*LAUNCHES, *LAUNCHES.values())
    assert not any(isinstance(one, torch.Tensor) for one in held)


def test_records_choose_the_kernel_and_its_config() -> None:
    pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")
    forward = [one for one in committed_table().entries if one.problem.op == "attention"]
    entries = [one for one in forward if one.problem.features != PLAIN]  # type: ignore[attr-defined]
    assert len(entries) > 20
    kernels = {kernel.name: kernel for kernel in ours()}
    for entry in entries:
        problem, gpu = entry.problem, gpu_named(entry.gpu)
        assert isinstance(problem, AttentionProblem)
        found = select(problem, gpu, committed_table(), ours(), "sdpa")
        offered = kernels[entry.kernel].configs(problem, gpu)
        right = (entry.config, "measured") if entry.config in offered else (offered[0], "modelled")
        assert (found.kernel, found.config, found.basis) == (entry.kernel, *right)


def test_an_explicit_request_never_falls_back() -> None:
    tensors, capped = (Q, K, K), Options(softcap=3.0)
    with pytest.raises(ValueError, match="kernel is 'x'; it must be one of"):
        attend(tensors, capped._replace(kernel="x"))
    with pytest.raises(CannotServe, match=r"'fwd_triton' cannot serve attn .* softcap3 on the CPU: .*; sdpa can"):
        attend(tensors, capped._replace(kernel="fwd_triton"))
    with pytest.raises(CannotServe, match=r"requires gradients: .* need a GPU; 'sdpa' can, or call it under torch.no_grad\(\)"):
        attend((Q.clone().requires_grad_(), K, K), capped._replace(kernel="fwd_triton"))
    assert torch.equal(attend(tensors, capped._replace(kernel="sdpa"))[0], attend(tensors, capped)[0])


def test_windows_and_prefixes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="window_left is -1; it must be at least 0"):
        attend((Q, K, K), Options(window_left=-1))
    with pytest.raises(ValueError, match="prefix is given and the mask is 'full'; it must be 'causal'"):
        attend(Tensors(Q, K, K, prefix=i32(1, 2)), Options())


@pytest.mark.parametrize("kind", ["boolean", "additive", "prefix"])
def test_biases_and_prefixes_of_equal_lengths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = randn(2, 1, 3, 9, seed=4)
    bias = (bias > 0 if kind == "boolean" else torch.where(bias > 1.5, -torch.inf, bias)).expand(2, 4, 3, 9)
    tensors, options = Tensors(Q, K, K, bias=bias), Options(return_lse=True, window_left=2, softcap=2.0)
    if kind == "prefix":
        tensors = Tensors(Q, K, K, prefix=i32(8, 0), sinks=randn(4))
        options = options._replace(mask="causal", softcap=0.0)
    whole = attend(tensors, options)
    LAUNCHES.clear()
    monkeypatch.setattr(padded, "_WEIGHTS_AT_ONCE", 100)  # in parts of a row
    for out, lse in (whole, attend(tensors, options)):
        assert lse is not None
        for i in range(2):
            q, k = Q[i].transpose(0, 1), K[i].transpose(0, 1)
            if kind == "prefix":
                asked = Row(True, (2, -1), prefix=(8, 0)[i])
                expected, of_lse = sequence_attention(q, k, k, asked, sinks=tensors.sinks)
            else:
                expected, of_lse = sequence_attention(q, k, k, Row(window=(2, -1), softcap=2.0), bias=bias[i])
            torch.testing.assert_close(out[i].transpose(0, 1).double(), expected, rtol=0, atol=5e-6)
            torch.testing.assert_close(lse[i].double(), of_lse, rtol=0, atol=5e-6)


def test_nothing_to_attend_gives_zeros() -> None:
    empty, k = Q.new_empty(1, 4, 0, 8), K[:1, :, :0]
    out, lse = attend(Tensors(empty, k, k, i32(0, 0, 0), i32(0, 0, 0)), Options(return_lse=True))
    assert out.shape == (1, 4, 0, 8)
    assert lse is not None
    assert lse.shape == (1, 4, 0)
    rows = Tensors(Q[:1], k, k, i32(0, 2, 3), i32(0, 0, 0))
    out, lse = attend(rows, Options(return_lse=True, max_seqlen_q=2))
    assert torch.all(out == 0.0)
    assert lse is not None
    assert torch.all(lse == -torch.inf)


@pytest.mark.parametrize("options", [Options(), Options(softcap=2.0), Options(window_left=1), Options(return_lse=True)])
@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 2), (0, 0)])
def test_every_input_has_a_gradient_where_there_is_nothing_to_attend(queries: int, keys: int, options: Options) -> None:
    given = [randn(1, 4, queries, 8), randn(1, 2, keys, 8), randn(1, 2, keys, 8)]
    q, k, v = (one.requires_grad_() for one in given)
    options = options._replace(max_seqlen_q=queries, max_seqlen_k=keys)
    out, _ = attend(Tensors(q, k, v, i32(0, 0, queries), i32(0, 0, keys)), options)
    for gradient, one in zip(torch.autograd.grad(out.sum(), (q, k, v)), given, strict=True):
        assert torch.equal(gradient, torch.zeros_like(one))


def test_the_append_is_refused_no_argument_that_its_kernel_would_misread() -> None:
    caches = [randn(2, 2, 9, 16) for _ in range(2)]
    with pytest.raises(ValueError, match=r"v has \(batch, heads, tokens, head_dim\) "):
        append_to_cache(Append(*caches, randn(2, 2, 1, 16), randn(2, 2, 2, 16), randn(2, 4, 1, 16), i32(1, 2)))
