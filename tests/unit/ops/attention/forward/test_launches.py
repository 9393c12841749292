"""Launches of the Hopper kernels with the public functions' own tensors, which are not the views that were bound to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tests.unit.ops.attention.calls import call_of
from tests.unit.tensors import i32

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, planned
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, Tensors
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.device import tma as copies
from flashmoe_science.ops.attention.forward.chunked_sm90 import kernel as chunk_gluon_sm90
from flashmoe_science.ops.attention.forward.chunked_sm90 import launch as chunk_launcher
from flashmoe_science.ops.attention.forward.prefill_sm90 import kernel as fwd_gluon_sm90
from flashmoe_science.ops.attention.forward.prefill_sm90 import launch as fwd_launcher
from flashmoe_science.ops.attention.forward.prefill_sm90 import packed_schedule as packed_tiles_triton
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.descriptors import RAGGED_ROWS

H200 = gpu_named("h200")


class Recorded:
    """In place of a Build: what it was launched with, a new tensor's address as None."""

    launched: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, function: Any, arguments: Any, **options: Any) -> None:
        self.name = function.__name__

    def encoder(
        self, index: int, template: Any, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[Any], tuple[Any, ...]]:
        return lambda one: (one.data_ptr(), shape, strides)  # a tensor: other versions of Triton take no address for a map

    def launch(self, grid: Any, *args: Any) -> None:
        Recorded.launched.append((self.name, grid, *args))

    def bound(self, grid: Any, *last: Any) -> Callable[..., None]:
        return lambda *args: self.launch(grid, *args, *last)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunk_launcher, chunk_merge, fwd_launcher, packed_tiles_triton):
        monkeypatch.setattr(module, "Build", Recorded)
    for module in (chunk_launcher, fwd_gluon_sm90):
        monkeypatch.setattr(module, "current_gpu", lambda device: H200)
        monkeypatch.setattr(module, "can_start_early", lambda device: False)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


Public = tuple[AttentionInputs, tuple[torch.Tensor | None, ...]]


def packed(text: str, queries: int, keys: int, **more: Any) -> Public:
    """A call of packed sequences, and the tensors of the public one."""
    q, k, v = normal(queries, 8, 64), normal(keys, 2, 64), normal(keys, 2, 64)
    lengths = {
        "cu_seqlens_q": i32(0, 100, queries),
        "cu_seqlens_k": i32(0, 150, keys),
        "max_seqlen_q": 256,
        "max_seqlen_k": 256,
    }
    views = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
    inputs = call_of(parse(text), *views, 0.125, True, **lengths, **more)
    return inputs, inputs.tensors._replace(q=q, k=k, v=v)


def packed_pages(text: str, **more: Any) -> Public:
    """Packed queries over a cache in pages of 64 rows."""
    q, pages = normal(300, 8, 64), [normal(40, 64, 2, 64) for _ in range(2)]
    lengths = {"cu_seqlens_q": i32(0, 100, 300), "max_seqlen_q": 256, "max_seqlen_k": 256, "cache_seqlens": i32(300, 20)}
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    views = (q.unsqueeze(0).transpose(1, 2), *(one.transpose(1, 2) for one in pages))
    inputs = call_of(parse(text), *views, 0.125, True, page_table=table, **lengths, **more)
    return inputs, inputs.tensors._replace(q=q, k=pages[0], v=pages[1])


def cached(text: str, page: int, **more: Any) -> Public:
    """The same over a cache, in pages or contiguous with rows that sequences share."""
    q, shape = normal(3, 16, 8, 64), (40, page, 2, 64) if page else (5, 640, 2, 64)
    k, v = normal(*shape), normal(*shape)
    table = torch.arange(30, dtype=torch.int32).view(3, 10) if page else None
    places = {"cache_seqlens": i32(300, 20, 5), "page_table": table, "cache_batch_idx": None if page else i32(4, 0, 1)}
    inputs = call_of(parse(text), *(x.transpose(1, 2) for x in (q, k, v)), 0.125, True, **places, **more)
    return inputs, inputs.tensors._replace(q=q, k=k, v=v)


def masked(text: str, bias: torch.Tensor) -> Public:
    """Sequences of one length under a mask or a bias that heads share."""
    q, k, v = normal(2, 8, 100, 64), normal(2, 2, 200, 64), normal(2, 2, 200, 64)
    inputs = call_of(parse(text), q, k, v, 0.125, True, bias=bias.expand(2, 8, 100, 200))
    return inputs, inputs.tensors._replace(bias=bias)


SINKS = torch.randn(8)
CASES = {
    "a bias": (fwd_gluon_sm90, masked("attn b2 h8 hk2 q100 k200 d64 bf16 bias", normal(2, 1, 100, 200))),
    "a mask": (fwd_gluon_sm90, masked("attn b2 h8 hk2 q100 k200 d64 bf16 boolmask", normal(1, 1, 1, 200) > 0)),
    "packed": (fwd_gluon_sm90, packed("attn b2 h8 hk2 q256 d64 bf16 causal packed", 300, 400)),
    "packed, capped": (fwd_gluon_sm90, packed("attn b2 h8 hk2 q256 d64 bf16 softcap30 packed", 300, 400, softcap=30.0)),
    "packed, window": (fwd_gluon_sm90, packed("attn b2 h8 hk2 q256 d64 bf16 causal left63 packed", 300, 400)),
    "packed, both ends of a window": (fwd_gluon_sm90, packed("attn b2 h8 hk2 q256 d64 bf16 left63 right9 packed", 300, 400)),
    "packed, used keys, sinks": (
        fwd_gluon_sm90,
        packed("attn b2 h8 hk2 q256 d64 bf16 causal sinks packed", 300, 400, cache_seqlens=i32(100, 90), sinks=SINKS),
    ),
    "packed, pages": (fwd_gluon_sm90, packed_pages("attn b2 h8 hk2 q256 d64 bf16 causal left31 packed page64")),
    "packed chunks": (chunk_gluon_sm90, packed("attn b2 h8 hk2 q256 d64 bf16 causal left63 packed", 300, 400)),
    "a cache": (chunk_gluon_sm90, cached("attn b3 h8 hk2 q16 k640 d64 bf16 causal ragged", 0)),
    "pages, capped, sinks": (
        chunk_gluon_sm90,
        cached("attn b3 h8 hk2 q16 k640 d64 bf16 causal softcap30 sinks ragged page64", 64, softcap=30.0, sinks=SINKS),
    ),
}


@pytest.mark.parametrize(
    ("case", "splits"),
    [(name, n) for name, (module, _) in CASES.items() for n in ((0, 1, 3) if module is chunk_gluon_sm90 else (0, 1))],
)
def test_a_launch_takes_the_public_functions_tensors(case: str, splits: int) -> None:
    module, (inputs, given) = CASES[case]
    launcher = module.plan(inputs, module.KERNEL.configs(inputs.problem, H200)[0])
    options = inputs.options._replace(num_splits=splits, tokens_first=True)
    found = launcher.bind(inputs.tensors, options)(given, None, ALL_KEYS, None, None)
    assert found is not None
    again = launches()
    planned_call = planned(module.KERNEL.plan, module.KERNEL.configs(inputs.problem, H200)[0], with_splits(inputs, splits))
    result = planned_call(with_splits(inputs, splits))
    out, lse = result.out, result.lse
    assert lse is not None
    assert found[1] is not None
    assert found[1].shape == (lse[0].shape if "packed" in case else lse.shape)
    tokens_first = out.transpose(1, 2)
    assert found[0].shape == (tokens_first[0].shape if "packed" in case else tokens_first.shape)
    new = {x.data_ptr() for x in (*found, out, lse) if x is not None}
    assert without(again, new) == without(launches(), new)


def with_splits(inputs: AttentionInputs, splits: int) -> AttentionInputs:
    return replace(inputs, options=inputs.options._replace(num_splits=splits))


@pytest.mark.parametrize(
    "text", ["attn b3 h8 hk2 q16 k640 d64 bf16 causal packed", "attn b3 h8 hk2 q16 k640 d64 bf16 alibi packed"]
)
def test_packed_queries_over_a_cache_are_left_to_other_kernels(text: str) -> None:
    lengths = {"cu_seqlens_q": i32(0, 16, 20, 30), "cache_seqlens": i32(300, 20, 5), "max_seqlen_q": 16}
    q, k, one = normal(1, 8, 30, 64), normal(3, 2, 640, 64), parse(text)
    inputs = call_of(one, q, k, k, 0.125, **lengths)
    launcher = fwd_gluon_sm90.plan(inputs, fwd_gluon_sm90.KERNEL.configs(one, H200)[0])
    with pytest.raises(CannotServe, match="keys are in a cache"):
        launcher.bind(inputs.tensors, inputs.options)


def launches() -> list[tuple[Any, ...]]:
    """What was launched since the last look."""
    found, Recorded.launched = Recorded.launched, []
    return found


def without(launched: list[tuple[Any, ...]], new: set[int]) -> list[list[Any]]:
    """The launches without the addresses of new tensors: those of results, and of the list of tiles or the partials, the only
    ones that are launched with and belong to no input."""
    return [
        [None if isinstance(one, int) and (one in new or one > 2**26) and one not in KEPT else one for one in each]
        for each in launched
    ]


KEPT = {one.data_ptr() for _, (inputs, given) in CASES.values() for one in (*given, *inputs.tensors) if one is not None}
KEPT.add(RAGGED_ROWS.value)  # no address


def test_a_launch_refuses_tensors_that_are_not_aligned_as_those_it_was_bound_to() -> None:
    module, (inputs, given) = CASES["a cache"]
    launcher = module.plan(inputs, module.KERNEL.configs(inputs.problem, H200)[0])
    assert not launcher.appends
    assert not launcher.takes_length
    launch = launcher.bind(inputs.tensors, inputs.options)
    held = normal(3 * 16 * 8 * 64 + 1)
    assert launch(Tensors(*given)._replace(q=held[1:].view(3, 16, 8, 64)), None, ALL_KEYS, None, None) is None
    assert launches() == []


def test_a_launch_refuses_a_bias_that_is_not_aligned_as_the_one_it_was_bound_to() -> None:
    module, (inputs, given) = CASES["a bias"]
    launcher = module.plan(inputs, module.KERNEL.configs(inputs.problem, H200)[0])
    held = normal(2 * 100 * 200 + 1)[1:].view(2, 1, 100, 200)
    launch = launcher.bind(inputs.tensors, inputs.options)
    assert launch(Tensors(*given)._replace(bias=held), None, ALL_KEYS, None, None) is None
    assert launches() == []


def test_descriptors_are_kept_by_the_addresses_of_all_tensors() -> None:
    made: list[tuple[int, ...]] = []

    def part(name: int) -> Callable[[torch.Tensor], tuple[int, ...]]:
        return lambda one: made.append((name, one.data_ptr())) or (name, one.data_ptr())  # type: ignore[func-returns-value]

    first, second = (copies.cached_descriptors([(part(n), None), (part(n + 1), part(n + 2))]) for n in (0, 10))
    a, b, c = (torch.zeros(8) for _ in range(3))
    expected = (0, a.data_ptr(), 1, b.data_ptr(), None, 2, b.data_ptr())
    assert [first(a, b), first(a, b)] == [expected, expected]
    assert len(made) == 3
    assert first(a, c) == (0, a.data_ptr(), 1, c.data_ptr(), None, 2, c.data_ptr())
    assert second(a, b)[0] == 10
    assert len(made) == 9
