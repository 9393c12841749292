"""What only a GPU shows of the functions for serving: our kernels, graphs that serve other lengths, and that nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashmoe_science as fm
from flashmoe_science.ops import calls
from flashmoe_science.ops.attention.front import choose

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@contextmanager
def no_wait_for_the_gpu() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


LENGTHS, NEW = (3, 0, 200, 77), 2
CACHED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "softcap": {"softcap": 10.0, "causal": True},
    "one split": {"num_splits": 1, "causal": True},
    "splits": {"num_splits": 3},
    "chunks": {"attention_chunk": 50, "causal": True},
    "leftpad": {"leftpad": True, "causal": True},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "rotary": {"rotary": True, "causal": True},
    "rotary in halves": {"rotary": True, "rotary_interleaved": False, "window_size": (9, 9)},
}


def cached_call(
    options: dict[str, Any], place: str, packed: bool, dtype: torch.dtype, kernel: str | None
) -> list[torch.Tensor]:
    """Output, log-sum-exp and caches of a call with an append, of the same values whatever serves it."""
    torch.manual_seed(1)
    options = dict(options)
    heads, heads_kv, width, page = 8, 2, 64, 16
    cache_dtype = E4M3 if dtype == E4M3 else dtype
    dtype = torch.bfloat16 if dtype == E4M3 else dtype
    q = randn(len(LENGTHS), NEW, heads, width, dtype=dtype)
    k, v = (randn(len(LENGTHS), NEW, heads_kv, width).to(cache_dtype) for _ in range(2))
    rows = (6, 256) if place != "pages" else (100, page)
    k_cache, v_cache = (randn(*rows, heads_kv, width).to(cache_dtype) for _ in range(2))
    table = torch.randperm(100, device="cuda")[:64].view(4, 16).int()
    used = (torch.tensor(LENGTHS, device="cuda") + NEW + page - 1) // page
    garbage = torch.where(torch.arange(16, device="cuda") < used[:, None], table, 2**30)
    arguments: dict[str, Any] = {"cache_seqlens": i32(*LENGTHS), "return_softmax_lse": True, "kernel": kernel}
    arguments |= {"page_table": garbage} if place == "pages" else {}
    arguments |= {"cache_batch_idx": i32(5, 0, 3, 1)} if place == "batch_idx" else {}
    if options.pop("leftpad", False):
        arguments["cache_leftpad"] = i32(1, 0, 90, 76)
    if options.pop("sinks", False):
        arguments["s_aux"] = randn(heads)
    if options.pop("alibi", False):
        arguments["alibi_slopes"] = torch.rand(heads, device="cuda")
    if options.pop("rotary", False):
        arguments |= {"rotary_cos": randn(300, 16, dtype=dtype), "rotary_sin": randn(300, 16, dtype=dtype)}
    if cache_dtype == E4M3:
        arguments |= {"k_descale": torch.rand(4, heads_kv, device="cuda"), "v_descale": torch.rand(4, heads_kv, device="cuda")}
    if packed:
        cu = i32(0, 2, 4, 6, 8)
        q, k, v = (one.flatten(0, 1) for one in (q, k, v))
        arguments |= {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": NEW}
    out, lse = fm.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **arguments, **options)
    return [out, lse, k_cache.float(), v_cache.float()]


PLACES = ("contiguous", "pages")
SERVED = [  # each costs a build or two
    *[(case, place, packed, torch.bfloat16) for case in CACHED for place in PLACES for packed in (False, True)],
    *[("causal", place, False, dtype) for place in PLACES for dtype in (torch.float16, torch.float32, E4M3)],
    *[("causal", "batch_idx", packed, torch.bfloat16) for packed in (False, True)],
]


@pytest.mark.parametrize(("case", "place", "packed", "dtype"), SERVED, ids=str)
def test_a_cache_is_attended_by_our_kernel_as_by_pytorchs_operators(
    case: str, place: str, packed: bool, dtype: torch.dtype
) -> None:
    found = cached_call(CACHED[case], place, packed, dtype, None)
    expected = cached_call(CACHED[case], place, packed, dtype, "sdpa")
    near = 2e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=near, atol=near)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (30, 7)}, {"causal": True, "softcap": 20.0}], ids=str
)
@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences_are_attended_as_by_pytorchs_operators(options: dict[str, Any], used: bool) -> None:
    lengths_q, lengths_k = (200, 1, 0, 70, 333), (250, 90, 20, 0, 333)
    cu_q, cu_k = (F.pad(torch.tensor(one).cumsum(0), (1, 0)).int().cuda() for one in (lengths_q, lengths_k))
    q, k, v = randn(sum(lengths_q), 8, 64), randn(sum(lengths_k), 2, 64), randn(sum(lengths_k), 2, 64)
    options = options | ({"seqused_q": i32(180, 1, 0, 70, 200), "seqused_k": i32(250, 33, 0, 0, 300)} if used else {})
    with no_wait_for_the_gpu():
        results = [
            fm.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 333, 333, return_attn_probs=True, kernel=kernel, **options)
            for kernel in (None, "sdpa")
        ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_a_graph_captured_at_one_length_serves_others(paged: bool, num_splits: int) -> None:
    batch, heads, heads_kv, width, capacity, page = 2, 8, 2, 128, 2048, 64
    q, k, v = randn(batch, 1, heads, width), randn(batch, 1, heads_kv, width), randn(batch, 1, heads_kv, width)
    cos, sin = randn(capacity, 32), randn(capacity, 32)
    rows = (batch * capacity // page, page) if paged else (batch, capacity)
    start = [randn(*rows, heads_kv, width) for _ in range(2)]
    table = torch.randperm(rows[0], device="cuda").view(batch, -1).int() if paged else None
    lengths = i32(700, 3)

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = fm.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, None, cos, sin, lengths, page_table=table, causal=True, num_splits=num_splits
        )
        assert isinstance(out, torch.Tensor)
        return out

    caches = [one.clone() for one in start]
    step(*caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*caches)
    for values in ((1, 0), (2047, 900), (64, 63), (1300, 1301)):
        lengths.copy_(i32(*values))
        expected_caches = [one.clone() for one in start]
        for one, first in zip(caches, start, strict=True):
            one.copy_(first)
        expected = step(*expected_caches)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected_caches, strict=True))


@pytest.mark.parametrize("case", ["causal", "chunks", "leftpad", "rotary", "sinks", "alibi"])
@pytest.mark.parametrize("place", ["contiguous", "pages"])
@pytest.mark.parametrize("kernel", [None, "sdpa"])
def test_nothing_waits_for_the_gpu(case: str, place: str, kernel: str | None) -> None:
    q, k, v = randn(2, 1, 8, 64), randn(2, 1, 2, 64), randn(2, 1, 2, 64)
    rows = (16, 16) if place == "pages" else (2, 128)
    caches, table = [randn(*rows, 2, 64) for _ in range(2)], torch.randperm(16, device="cuda").view(2, 8).int()
    options = dict(CACHED[case])
    if options.pop("rotary", False):
        options |= {"rotary_cos": randn(300, 16), "rotary_sin": randn(300, 16)}
    options |= {"cache_leftpad": i32(0, 3)} if options.pop("leftpad", False) else {}
    options |= {"s_aux": randn(8)} if options.pop("sinks", False) else {}
    options |= {"alibi_slopes": torch.rand(8, device="cuda")} if options.pop("alibi", False) else {}
    options |= {"page_table": table} if place == "pages" else {}
    lengths = i32(30, 100)
    with no_wait_for_the_gpu():
        fm.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, kernel=kernel, **options)
        fm.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=9, kernel=kernel, **options)


def test_a_cache_that_grows_makes_no_new_launcher() -> None:
    q, capacity = randn(1, 1, 8, 64), 512
    k_cache, v_cache = randn(1, capacity, 2, 64), randn(1, capacity, 2, 64)
    for length in (1, 40):
        fm.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)
    launchers, stored = len(choose.LAUNCHERS), len(calls.LAUNCHES)
    for length in range(41, 300):
        fm.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)
    assert (len(choose.LAUNCHERS), len(calls.LAUNCHES)) == (launchers, stored)
    for length in range(64, 300):  # tensors that grow: with a window no other kernel serves them
        fm.flash_attn_func(q, k_cache[:, :length], v_cache[:, :length], window_size=(50, 0))
    assert len(choose.LAUNCHERS) <= launchers + 4


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("shape", [(2, 8, 70, 130), (70, 130), (2, 1, 1, 130)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_are_served_by_our_kernel_as_pytorch_serves_them(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = randn(2, 8, 70, 64, dtype=dtype), randn(2, 2, 130, 64, dtype=dtype), randn(2, 2, 130, 64, dtype=dtype)
    mask = torch.rand(shape, device="cuda") > 0.3
    if kind == "additive":
        mask = torch.where(mask, torch.randn(shape, device="cuda"), -torch.inf).to(dtype)
    if shape[-2] == 70:
        mask[..., 5, :] = False if kind == "boolean" else -torch.inf
    assert fm.explain(q, k, v, mask, enable_gqa=True).kernel in ("split_triton", "fwd_gluon_sm90")
    out = fm.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    near = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=near, atol=near)
    if shape[-2] == 70:
        assert torch.all(out[..., 5, :] == 0.0)


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_decode_gives_the_same_bits(mode: str) -> None:
    torch._dynamo.reset()
    k_cache, v_cache = randn(2, 256, 2, 64), randn(2, 256, 2, 64)
    new = randn(2, 1, 2, 64)

    def step(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out = fm.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True)
        assert isinstance(out, torch.Tensor)
        return out * 2.0

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for lengths in (i32(3, 200), i32(4, 201), i32(90, 17)):
        q = randn(2, 1, 8, 64)
        copies = k_cache.clone(), v_cache.clone()
        expected = step(q, *copies, lengths)
        assert torch.equal(compiled(q, k_cache, v_cache, lengths).clone(), expected)
        assert torch.equal(k_cache, copies[0])
        assert torch.equal(v_cache, copies[1])


def test_gradients_are_served_by_pytorchs_operators() -> None:
    cu = i32(0, 40, 100)
    q, k, v = (randn(100, 4, 64).requires_grad_() for _ in range(3))
    out = fm.flash_attn_varlen_func(q, k, v, cu, cu, 60, 60, causal=True, window_size=(20, 0))
    assert isinstance(out, torch.Tensor)
    out.float().square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in (q, k, v))
    with torch.no_grad():
        again = fm.flash_attn_varlen_func(q, k, v, cu, cu, 60, 60, causal=True, window_size=(20, 0))
    torch.testing.assert_close(again, out, rtol=2e-2, atol=2e-2)
