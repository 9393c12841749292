"""The list of tiles of packed sequences, in Triton's interpreter."""

from __future__ import annotations

import json
from itertools import accumulate
from random import Random
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from listed_tiles import UNWRITTEN
from tests.unit.interpreter import Interpreter

from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import most_tiles

MOST_KEYS = 900  # of a sequence in pages
SCRIPT = "ops/attention/listed_tiles.py"


def case(queries: list[int], keys: list[int], rows: int = 32, used: list[int] | None = None, less: int = 0) -> dict[str, Any]:
    most = most_tiles(sum(queries), len(queries), rows) - less
    return {"queries": queries, "keys": keys, "rows": rows, "used": used, "most": most, "most_keys": MOST_KEYS}


def expected(one: dict[str, Any]) -> list[list[int]]:
    """Sequences of the most keys first."""
    ends_q, begins_k = (
        list(accumulate(one["queries"])),
        [0, *accumulate(one["keys"])] if one["keys"] else [0] * len(one["used"]),
    )
    most = one["keys"] or [MOST_KEYS] * len(one["used"])
    keys = [max(min(pair), 0) for pair in zip(most, one["used"] or most, strict=True)]
    tiles: list[list[int]] = []
    for n in sorted(range(len(keys)), key=lambda n: (-keys[n], n)):
        count = -(-one["queries"][n] // one["rows"])
        tiles += [[n, len(tiles), count, ends_q[n], one["queries"][n], begins_k[n] + keys[n], keys[n]]] * count
    return tiles


def drawn(seed: int) -> dict[str, Any]:
    chance = Random(seed)
    batch = chance.choice([1, 2, 9, 40])
    queries, keys = ([chance.choice([0, 1, chance.randint(1, 300)]) for _ in range(batch)] for _ in range(2))
    used = [chance.randint(0, 400) for _ in range(batch)] if chance.random() < 0.4 else None
    return case(queries, keys, chance.choice([8, 32, 128]), used)


def test_every_tile_is_listed_once_the_longest_first(interpreted: Interpreter) -> None:
    """One sequence of more tiles than are listed at once, and more sequences than are compared at once, among them."""
    cases = [
        case([100, 32, 0, 1], [100, 32, 0, 1]),
        case([5], [7]),
        case([5000, 3], [9, 9], rows=8),
        case([3] * 300, [1 + n % 7 for n in range(300)], rows=8),
        case([70, 5, 40], [], used=[2000, -1, 899]),  # in pages
        *map(drawn, range(12)),
    ]
    for one, found in zip(cases, interpreted(SCRIPT, json.dumps(cases)), strict=True):
        assert found["taken"] == 0
        assert found["tiles"][: found["count"]] == expected(one)


def test_no_list_is_written_past_its_end(interpreted: Interpreter) -> None:
    """Whatever the lengths say."""
    (found,) = interpreted(SCRIPT, json.dumps([case([100, 90], [100, 90], less=3)]))
    assert found["count"] == len(found["tiles"]) == 4
    assert {number for row in found["after"] for number in row} == {UNWRITTEN}
