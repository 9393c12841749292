"""A call of context attention is explained without messages; its predicted time is that of our records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashmoe_science import explain
from flashmoe_science.operations import parse_problem
from flashmoe_science.parallel import context_attention, context_decode
from flashmoe_science.parallel.choose import Exchanges
from flashmoe_science.parallel.cost import MISFIT, pairs
from flashmoe_science.parallel.layout import Cut, cut

RUNS = Path(__file__).parents[3] / "evidence/runs"
RECORDS = RUNS / "h100/20261126T132449Z-context.jsonl", RUNS / "h200/20261127T222813Z-9ad95c-context.jsonl"
S = 512  # tokens of a rank


@pytest.fixture
def ranks() -> Iterator[int]:
    """Eight, of which only this one is here: messages would not arrive."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield 8
    dist.destroy_process_group()


def explained(heads: int, keys: int, device: str = "meta", **options: Any) -> str:
    q, k = (torch.empty(1, S, count, 128, dtype=torch.bfloat16, device=device) for count in (heads, keys))
    return str(explain(context_attention, q, k, k, group=dist.group.WORLD, **{"causal": True, **options}))


def megabytes(way: str, heads: int, keys: int, ranks: int) -> str:
    """Of the formulas in docs/several-gpus.md."""
    tokens = ranks * S * (ranks - 1) / ranks
    elements = 2 * keys * 128 * tokens if way == "keys" else 2 * (heads + keys) * 128 * tokens / ranks
    return f"{2 * elements / 1e6:.1f} MB received"


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_bytes_of_both_exchanges_are_told_and_nothing_is_sent(ranks: int, exchange: str, device: str) -> None:
    first, *rest = explained(32, 8, device, exchange=exchange).splitlines()
    other = "heads" if exchange == "keys" else "keys"
    assert f"exchange is '{exchange}', asked for by name: {megabytes(exchange, 32, 8, ranks)}" in first
    assert f"not exchange '{other}': {megabytes(other, 32, 8, ranks)}" in rest[-2]
    assert ("attention in some" in first) == (device == "meta")  # the CPU's time is not predicted


@pytest.mark.parametrize(
    ("heads", "keys", "options", "words"),
    [
        (32, 8, {}, "'heads', as a rank receives fewer bytes"),
        (32, 8, {"causal": False}, "'heads', as a rank receives fewer bytes"),
        (64, 8, {}, "'keys', as by heads a rank receives no fewer bytes"),
        (32, 4, {}, "'keys', as 8 ranks do not divide the heads, 4 of k"),
        (32, 8, {"window_size": (256, 0)}, "'keys', as by heads a rank receives no fewer bytes"),
    ],
)
def test_the_exchange_of_fewer_bytes_is_chosen(ranks: int, heads: int, keys: int, options: dict[str, Any], words: str) -> None:
    assert f"exchange is {words}" in explained(heads, keys, **options)


@pytest.mark.parametrize(("heads", "keys", "saves"), [(32, 8, True), (32, 32, True), (64, 4, False)])
def test_a_ring_is_asked_for_by_name_and_its_memory_is_told(ranks: int, heads: int, keys: int, saves: bool) -> None:
    assert "exchange is 'ring'" not in explained(heads, keys)
    first, *rest = explained(heads, keys, exchange="ring").splitlines()
    tokens, token = ranks * S, 2 * 2 * keys * 128  # bytes of a token's keys and values
    held = (2 * token + 4 * heads * 128) * S
    assert f"{tokens * token * 7 / 8 / 1e6:.1f} MB received in some" in first
    assert f"{held / 1e6:.1f} MB held, not for a backward, attention in some" in first
    assert "of two GPUs on record are up to 8% off" in first
    assert f"{tokens * token / 1e6:.1f} MB held, also for a backward" in rest[-2]
    assert (held < tokens * token) == saves == (ranks > 2 + heads / keys)


@pytest.mark.parametrize("queries", [1, 3])
def test_what_merges_a_step_of_decoding_is_told_and_nothing_is_sent(ranks: int, queries: int) -> None:
    q, k = (torch.empty(3, tokens, heads, 64, dtype=torch.bfloat16) for tokens, heads in ((queries, 32), (70, 4)))
    lengths = torch.tensor([9, 0, 60], dtype=torch.int32)
    words = str(explain(context_decode, q, k, k, q[:, :, :4], q[:, :, :4], group=dist.group.WORLD, cache_seqlens=lengths))
    assert (
        f"parts are merged behind a collective of fake: {(ranks - 1) * 3 * queries * 32 * (2 * 64 + 4) / 1e6:.1f} MB received"
        in words
    )


def test_of_documents_no_time_is_predicted(ranks: int) -> None:
    q, starts = torch.empty(S, 16, 128, dtype=torch.bfloat16), torch.tensor([0, ranks * S], dtype=torch.int32)
    words = str(explain(context_attention, q, q, q, group=dist.group.WORLD, cu_seqlens=starts))
    assert "MB received" in words
    assert "attention in" not in words


def test_pairs_are_those_of_a_mask() -> None:
    for left, right in ((None, 0), (None, None), (3, 2), (0, 0), (40, None)):
        query, key = torch.arange(7, 19)[:, None], torch.arange(30)
        seen = torch.ones(12, 30, dtype=torch.bool)
        seen &= (key >= query - left) if left is not None else seen
        seen &= (key <= query + right) if right is not None else seen
        assert pairs(range(7, 19), 30, left, right) == int(seen.sum())


def test_calls_on_record_take_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_science.parallel.layout.process_group", lambda group: group)
    times: dict[tuple[str, str, str], float] = {}
    for file in RECORDS:
        for row in map(json.loads, file.read_text().splitlines()):
            if row["kind"] == "timing" and row["kernel"] == "context_attention":
                times[file.parent.name, row["problem"], row["config"]] = median(row["a"]) / 1e9
    off: dict[str, list[float]] = {way: [] for way in MISFIT}
    for (_, text, config), seconds in times.items():
        problem: Any = parse_problem(text.removesuffix(" cp2"))
        held: Cut = cut(problem.seqlen_q, SimpleNamespace(size=lambda: 2), "head_tail")
        counts = problem.heads, problem.heads_kv, problem.heads_kv
        qkv = [torch.empty(1, problem.seqlen_q // 2, count, 128, dtype=torch.bfloat16, device="meta") for count in counts]
        needed = [[range(chunk.stop) for chunk in chunks] for chunks in held.chunks]
        exchanges = Exchanges(qkv, held, needed, object() if config == "copies" else None)  # type: ignore[arg-type]
        way = config if config in MISFIT else "keys"
        predicted = exchanges.cost(way, True).seconds + exchanges.seconds(way, (None, 0))  # type: ignore[operator]
        off[way].append(predicted / seconds - 1)
    assert {way: len(each) for way, each in off.items()} == {"keys": 12, "heads": 6, "ring": 4}
    for way, each in off.items():
        assert MISFIT[way] - 0.03 < max(map(abs, each)) < MISFIT[way]
