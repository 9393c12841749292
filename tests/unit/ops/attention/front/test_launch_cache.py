"""The launch cache of calls of serving and with masks, with launches that compute nothing: which are found, and which not.

That their results are right is for tests/unit/interpreted_serving.py and test_serving_on_gpu.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.unit.tensors import i32
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe_science as fm
from flashmoe_science import serving
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops import calls
from flashmoe_science.ops import choose as any_choice
from flashmoe_science.ops.attention.forward.splitkv import launch as split_launcher
from flashmoe_science.ops.attention.front import choose, operator, sdpa

Given = dict[str, Any]
STARTED: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]] = []


class Recorded:
    """In the place of a Build: a launch that notes its kernel, grid and arguments."""

    def __init__(self, function: Any, arguments: Any, **options: Any) -> None:
        name = function.__name__
        self.launch = lambda grid, *given: STARTED.append((name, grid, given))
        self.bound = lambda grid, *last: lambda *given: self.launch(grid, *given, *last)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (choose, split_launcher):
        monkeypatch.setattr(module, "gpu_of", lambda q: gpu_named("h200"))
    monkeypatch.setattr(sdpa, "_is_on_nvidia", lambda tensor: True)
    monkeypatch.setattr(split_launcher, "Build", Recorded)
    monkeypatch.setattr(split_launcher, "can_start_early", lambda device: True)
    STARTED.clear()
    yield
    STARTED.clear()


def stored(public: bool) -> list[calls.CachedLaunch]:
    """The launches stored under the public functions' own arguments, or under those of ``attend``."""
    return [one for key, found in calls.LAUNCHES.items() if bool(key[5:] and key[5]) == public for one in found]


def cached(**others: Any) -> Given:
    """Arguments of flash_attn_with_kvcache: two sequences that grow by a token each."""
    k_cache, v_cache = torch.randn(2, 640, 2, 64), torch.randn(2, 640, 2, 64)
    q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": i32(3, 9), "causal": True}
    return given | others


def packed(**others: Any) -> Given:
    q, k, v = torch.randn(6, 8, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    lengths = {"cu_seqlens_q": i32(0, 4, 6), "cu_seqlens_k": i32(0, 4, 9), "max_seqlen_q": 4, "max_seqlen_k": 5}
    return {"q": q, "k": k, "v": v, "causal": True} | lengths | others


def rotated(**others: Any) -> Given:
    return cached(rotary_cos=torch.randn(640, 16), rotary_sin=torch.randn(640, 16), **others)


def paged(**others: Any) -> Given:
    pages = {"k_cache": torch.randn(12, 16, 2, 64), "v_cache": torch.randn(12, 16, 2, 64)}
    return cached(page_table=torch.arange(10, dtype=torch.int32).view(2, 5), **pages, **others)


def paged_varlen(**others: Any) -> Given:
    pages = {"k": torch.randn(12, 16, 2, 64), "v": torch.randn(12, 16, 2, 64), "block_table": paged()["page_table"]}
    return packed(**pages | {"cu_seqlens_k": None, "seqused_k": i32(4, 60), "max_seqlen_k": 60} | others)


def masked(**others: Any) -> Given:
    query, key, value = torch.randn(2, 8, 3, 64), torch.randn(2, 8, 200, 64), torch.randn(2, 8, 200, 64)
    given = {"query": query, "key": key, "value": value, "attn_mask": torch.rand(2, 1, 3, 200) > 0.5}
    return given | others


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Given]]] = {
    "append": (fm.flash_attn_with_kvcache, cached),
    "rotary": (fm.flash_attn_with_kvcache, rotated),
    "rotary from other positions": (fm.flash_attn_with_kvcache, lambda **o: rotated(rotary_seqlens=i32(1, 2), **o)),
    "pages": (fm.flash_attn_with_kvcache, paged),
    "places": (fm.flash_attn_with_kvcache, lambda **o: cached(cache_batch_idx=i32(1, 0), **o)),
    "leftpad": (fm.flash_attn_with_kvcache, lambda **o: cached(cache_leftpad=i32(1, 0), **o)),
    "a length": (fm.flash_attn_with_kvcache, lambda **o: cached(cache_seqlens=7, **o)),
    "decode": (fm.flash_attn_with_kvcache, lambda **o: cached(k=None, v=None, **o)),
    "splits": (fm.flash_attn_with_kvcache, lambda **o: cached(num_splits=3, **o)),
    "log-sum-exp": (fm.flash_attn_with_kvcache, lambda **o: cached(return_softmax_lse=True, **o)),
    "packed": (fm.flash_attn_varlen_func, packed),
    "packed, log-sum-exp": (fm.flash_attn_varlen_func, lambda **o: packed(return_attn_probs=True, **o)),
    "packed, pages": (fm.flash_attn_varlen_func, paged_varlen),
    "packed, used keys": (fm.flash_attn_varlen_func, lambda **o: packed(seqused_k=i32(2, 5), **o)),
    "a mask": (fm.scaled_dot_product_attention, masked),
    "a mask of all heads and queries": (
        fm.scaled_dot_product_attention,
        lambda **o: masked(attn_mask=torch.rand(1, 200) > 0.5, scale=0.5, **o),
    ),
    "a bias": (fm.scaled_dot_product_attention, lambda **o: masked(attn_mask=torch.randn(2, 8, 3, 200), **o)),
    "a mask, shared keys": (
        fm.scaled_dot_product_attention,
        lambda **o: masked(query=torch.randn(2, 3, 16, 64).transpose(1, 2), enable_gqa=True, **o),
    ),
}


def launched(call: Callable[..., Any], given: Given) -> list[tuple[str, tuple[int, int, int], tuple[Any, ...]]]:
    """What the call launches."""
    STARTED.clear()
    call(**given)
    return STARTED.copy()


@pytest.mark.parametrize("case", list(CASES))
def test_a_call_like_one_before_is_launched_as_that_was(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, make = CASES[case]
    given, others = make(), make()
    result = call(**given)
    first = STARTED.copy()

    def fail(*arguments: Any) -> None:
        raise AssertionError("a call like one before is taken for a new one")

    monkeypatch.setattr(serving, "mask_of", fail)
    monkeypatch.setattr(sdpa, "_bias", fail)
    again = call(**others)
    second = STARTED[len(first) :]
    assert [one[:2] for one in first] == [one[:2] for one in second]
    assert 1 <= len(first) <= 2
    addresses = {one.data_ptr() for one in others.values() if isinstance(one, torch.Tensor)}
    assert addresses <= {one for one in second[0][2] if isinstance(one, int)}
    pairs = zip(result, again, strict=True) if isinstance(result, tuple) else [(result, again)]
    assert all((a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in pairs)


@pytest.mark.parametrize("case", list(CASES))
def test_results_are_as_a_new_call_gives_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, make = CASES[case]
    with monkeypatch.context() as context:
        for module in (serving, sdpa):
            context.setattr(module, "cached_call", lambda *arguments: (None, None))
        long = call(**make())
    short = call(**make())
    pairs = zip(long, short, strict=True) if isinstance(long, tuple) else [(long, short)]
    assert all((a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in pairs)


@pytest.mark.parametrize("case", list(CASES))
def test_a_call_is_explained_by_the_kernel_that_it_launches(case: str) -> None:
    call, make = CASES[case]
    given = make()
    before = {name: one.clone() for name, one in given.items() if isinstance(one, torch.Tensor)}
    decisions = [fm.explain(call, **given)]
    names = {name for name, *_ in launched(call, given)}
    STARTED.clear()
    decisions.append(fm.explain(call, **given))  # though a launch is stored
    assert STARTED == []
    assert decisions[0] == decisions[1]
    assert f"flashmoe_{decisions[0].kernel}" in names
    assert all(torch.equal(given[name], one) for name, one in before.items())


WRONG: dict[str, tuple[Callable[..., Given], str, Callable[[torch.Tensor], Any]]] = {
    "a cache of another dtype": (cached, "k_cache", lambda one: one.half()),
    "a cache of other heads": (cached, "v_cache", lambda one: one.repeat(1, 1, 3, 1)),
    "a cache on another device": (cached, "k_cache", lambda one: one.to("meta")),
    "a cache strided in its last dimension": (cached, "k_cache", lambda one: one.repeat(1, 1, 1, 2)[..., ::2]),
    "lengths of 64 bits": (cached, "cache_seqlens", torch.Tensor.long),
    "lengths of three": (cached, "cache_seqlens", lambda one: i32(1, 2, 3)),
    "a negative length": (cached, "cache_seqlens", lambda one: -1),
    "a length of True": (cached, "cache_seqlens", lambda one: True),
    "new keys of another dtype": (cached, "k", lambda one: one.double()),
    "new keys of other heads": (cached, "k", lambda one: one.repeat(1, 1, 2, 1)),
    "no new values": (cached, "v", lambda one: None),
    "a nested query": (cached, "q", lambda one: torch.nested.nested_tensor(list(one))),
    "a sparse query": (cached, "q", torch.Tensor.to_sparse),
    "a list": (cached, "q", torch.Tensor.tolist),
    "tables of other lengths": (rotated, "rotary_sin", lambda one: one[:9]),
    "a table of floats": (paged, "page_table", torch.Tensor.float),
    "a table of three sequences": (paged, "page_table", lambda one: one.repeat(2, 1)[:3]),
    "a scale of NaN": (lambda: cached(softmax_scale=1.0), "softmax_scale", lambda one: float("nan")),
    "a flag of 1": (cached, "causal", lambda one: 1),
    "splits of -1": (lambda: cached(num_splits=1), "num_splits", lambda one: -1),
    "starts of 64 bits": (packed, "cu_seqlens_q", torch.Tensor.long),
    "starts of another batch": (packed, "cu_seqlens_k", lambda one: one[:2]),
    "keys of another dtype": (packed, "k", lambda one: one.half()),
    "a negative maximum": (packed, "max_seqlen_k", lambda one: -1),
    "a mask of other keys": (masked, "attn_mask", lambda one: one[..., :7]),
    "a mask of another dtype": (masked, "attn_mask", torch.Tensor.double),
    "keys of other length": (masked, "key", lambda one: one[:, :, :7]),
}
FUNCTIONS = {
    "k_cache": fm.flash_attn_with_kvcache,
    "cu_seqlens_q": fm.flash_attn_varlen_func,
    "attn_mask": fm.scaled_dot_product_attention,
}


@pytest.mark.parametrize("case", list(WRONG))
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own, of nested tensors
def test_what_is_wrong_is_refused_though_a_launch_is_stored(case: str) -> None:
    make, name, spoil = WRONG[case]
    given = make()
    call: Any = next(function for argument, function in FUNCTIONS.items() if argument in given)
    call(**given)
    call(**given)
    STARTED.clear()
    with pytest.raises((TypeError, ValueError)):
        call(**given | {name: spoil(given[name])})
    assert STARTED == []


def test_a_mask_of_another_alignment_is_a_call_of_its_own() -> None:
    """Its elements are read as many at a time as its own address allows."""
    given = masked(attn_mask=torch.randn(2, 8, 3, 200))
    for one in (given, given):
        assert len(launched(fm.scaled_dot_product_attention, one)) >= 1
    held = torch.randn(2 * 8 * 3 * 200 + 1)[1:].view(2, 8, 3, 200)
    assert stored(public=False) == []
    launched(fm.scaled_dot_product_attention, given | {"attn_mask": held})
    assert len(stored(public=False)) == 1


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that a kernel was chosen for."""
    problems: list[Any] = []
    select = any_choice.select

    def spy(problem: Any, *args: Any) -> Any:
        problems.append(problem)
        return select(problem, *args)

    monkeypatch.setattr(any_choice, "select", spy)
    return problems


def test_keys_under_a_mask_that_grow_by_a_token_are_chosen_for_once_a_class(chosen: list[Any]) -> None:
    for keys in range(150, 161):
        given = masked(key=torch.randn(2, 8, keys, 64), value=torch.randn(2, 8, keys, 64), attn_mask=torch.rand(1, keys) > 0.5)
        assert keys in launched(fm.scaled_dot_product_attention, given)[0][2]
    assert len(chosen) == 1


def test_a_masked_call_is_explained_by_the_choice_that_it_is_launched_by(chosen: list[Any]) -> None:
    given = masked(query=torch.randn(2, 8, 150, 64), attn_mask=torch.rand(150, 200) > 0.5)
    assert fm.explain(**given).kernel == "split_triton"
    assert launched(fm.scaled_dot_product_attention, given)
    assert len(chosen) == 1


def test_a_cache_that_is_sliced_is_read_to_its_end() -> None:
    given = cached()
    whole = launched(fm.flash_attn_with_kvcache, given)
    sliced = given | {name: given[name][:, :100] for name in ("k_cache", "v_cache")}
    for _ in range(2):
        part = launched(fm.flash_attn_with_kvcache, sliced)
        assert 640 in whole[0][2]
        assert 640 not in part[0][2]
        assert 100 in part[0][2]
    assert launched(fm.flash_attn_with_kvcache, given)[0][1] == whole[0][1]


def test_calls_that_differ_in_strides_or_options_are_stored_each() -> None:
    given = cached()
    variants = [
        given,
        given | {"k_cache": torch.randn(2, 2, 640, 64).transpose(1, 2)},
        given | {"num_splits": 1},
        given | {"num_splits": 2},
        given | {"causal": False},
        given | {"window_size": (5, 0)},
        given | {"softmax_scale": -1.0},
        given | {name: given[name].half() for name in ("q", "k_cache", "v_cache", "k", "v")},
    ]
    first = [launched(fm.flash_attn_with_kvcache, one) for one in variants]
    assert len(stored(public=True)) == len(variants)
    assert [len(one) for one in first[2:4]] == [1, 2]
    assert [[one[:2] for one in launched(fm.flash_attn_with_kvcache, one)] for one in variants] == [
        [one[:2] for one in launch] for launch in first
    ]
    assert len(stored(public=True)) == len(variants)


def test_most_keys_of_a_class_share_a_call() -> None:
    given = paged_varlen()
    for most in range(1, 81):
        assert len(launched(fm.flash_attn_varlen_func, given | {"max_seqlen_k": most})) == 1
    assert len(calls.LAUNCHES) == 2


def test_a_tensor_given_twice_is_stored_too() -> None:
    """One tensor of lengths for queries and keys, as models of packed prompts have; and then two again."""
    given = packed()
    one = given | {"cu_seqlens_k": given["cu_seqlens_q"], "k": given["v"]}
    for variant in (one, one, given, one, given | {"k": given["v"]}):
        assert len(launched(fm.flash_attn_varlen_func, variant)) == 1
    assert len(stored(public=True)) == 3


def test_memory_that_is_not_aligned_is_a_call_of_its_own() -> None:
    given = cached(k=None, v=None)
    fm.flash_attn_with_kvcache(**given)
    held = torch.randn(2 * 8 * 64 + 1)
    out = fm.flash_attn_with_kvcache(**given | {"q": held[1:].view(2, 1, 8, 64)})
    assert out.shape == (2, 1, 8, 64)
    assert len(stored(public=False)) == 1


@pytest.mark.parametrize("case", ["decode", "packed", "a bias"])
def test_gradients_modes_and_transforms_launch_nothing(case: str) -> None:
    call, make = CASES[case]
    given = make()
    query = next(iter(given))
    call(**given)
    asked = given[query].clone().requires_grad_()
    STARTED.clear()
    for _ in range(2):
        result = call(**given | {query: asked})
        result.sum().backward()
        with FakeTensorMode() as mode:
            fake = {name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for name, one in given.items()}
            assert type(call(**fake)) is not torch.Tensor
        _, tangent = torch.func.jvp(lambda q: call(**given | {query: q}), (given[query],), (asked.detach(),))
        assert tangent.isfinite().all()
    assert STARTED == []
    assert asked.grad is not None
    with torch.no_grad():
        assert launched(call, given | {query: asked})
        assert launched(call, given | {query: asked})


def test_a_compiled_call_is_traced_through() -> None:
    torch._dynamo.reset()
    given = cached(k=None, v=None)
    fm.flash_attn_with_kvcache(**given)
    compiled = torch.compile(lambda q: fm.flash_attn_with_kvcache(**given | {"q": q}), backend="eager", fullgraph=True)
    assert compiled(given["q"]).shape == given["q"].shape


def test_inference_mode_is_served_by_our_kernel() -> None:
    given = cached()
    for _ in range(2):
        assert launched(fm.flash_attn_with_kvcache, given)
        with torch.inference_mode():
            assert launched(fm.flash_attn_with_kvcache, cached())


def test_no_tensor_is_held() -> None:
    given = rotated()
    out = fm.flash_attn_with_kvcache(**given)
    STARTED.clear()
    held = [weakref.ref(one) for one in (out, *given.values()) if isinstance(one, torch.Tensor)]
    del given, out
    gc.collect()
    assert [one() for one in held if one() is not None] == []


# A cache that grows by slices -------------------------------------------------------------------------------------------------


def grown(keys: int, cache: torch.Tensor, **options: Any) -> None:
    q = torch.randn(1, 1, 8, 64, dtype=cache.dtype)
    fm.flash_attn_func(q, cache[:, :keys], cache[:, :keys], **options)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of keys of calls that were planned anew."""
    keys: list[int] = []
    plan_call = operator.plan_call

    def spy(tensors: Any, *rest: Any) -> Any:
        keys.append(tensors.k.shape[2])
        return plan_call(tensors, *rest)

    monkeypatch.setattr(operator, "plan_call", spy)
    return keys


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window_size": (900, 0)}], ids=str)
def test_a_slice_of_a_cache_is_planned_once_a_class_of_lengths(options: dict[str, Any], planned: list[int]) -> None:
    cache = torch.randn(1, 2048, 2, 64)
    for keys in range(1025, 1793):
        STARTED.clear()
        grown(keys, cache, **options)
        assert keys in STARTED[0][2]
    assert planned == [1025, 1281, 1537]
    assert len(stored(public=False)) == 3


def test_a_measured_length_keeps_its_own_plan(monkeypatch: pytest.MonkeyPatch, planned: list[int]) -> None:
    monkeypatch.setattr(choose, "_measured_sizes", lambda: frozenset({(1, 8, 2, 1, 1200, 64, 64)}))
    found: list[Any] = []
    lengths = operator.key_lengths
    monkeypatch.setattr(operator, "key_lengths", lambda *given: found.append(lengths(*given)) or found[-1])
    cache = torch.randn(1, 2048, 2, 64)
    for keys in (1100, 1200, 1201, 1200, 1100):
        grown(keys, cache)
    assert planned == [1100, 1200]
    assert [tuple(one) for one in found] == [(1025, 1280, frozenset({1, 1200})), (1200, 1200, frozenset())]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_keys_and_values_of_other_lengths_are_refused() -> None:
    cache, q = torch.randn(1, 2048, 2, 64), torch.randn(1, 1, 8, 64)
    grown(1100, cache)
    with pytest.raises(ValueError, match="1100"):
        fm.flash_attn_func(q, cache[:, :1100], cache[:, :1101])
    with pytest.raises(TypeError, match="float16"):
        fm.flash_attn_func(q, cache[:, :1100], cache.half()[:, :1100])
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 64)] * 2)
    with pytest.raises((TypeError, ValueError)):
        fm.flash_attn_func(q, nested, nested)


def test_queries_as_many_as_keys_are_a_problem_of_their_own_under_the_top_left_mask(planned: list[int]) -> None:
    cache = torch.randn(1, 2, 2048, 64)
    for keys in (1100, 1101, 1102, 1100, 1101):
        STARTED.clear()
        q = torch.randn(1, 2, 1101, 64)
        options = {"is_causal": True, "kernel": "split_triton"}
        fm.scaled_dot_product_attention(q, cache[:, :, :keys], cache[:, :, :keys], **options)  # type: ignore[arg-type]
        assert STARTED
    assert planned == [1100, 1101]
