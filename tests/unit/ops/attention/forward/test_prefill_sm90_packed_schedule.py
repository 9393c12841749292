"""The list of tiles of packed sequences, in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from tests.unit.interpreter import Interpreter

from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import (
    NUMBERS_OF_TILE,
    list_of_tiles,
    max_tiles,
    numbers,
)

MOST_KEYS = 900  # of a sequence in pages
UNWRITTEN = -7


def case(
    queries: list[int], keys: list[int], rows: int = 32, used: list[int] | None = None, less: int = 0, rest: int = 0
) -> dict[str, Any]:
    total = sum(queries) + rest
    most = max_tiles(total, len(queries), rows) - less
    return {"queries": queries, "keys": keys, "rows": rows, "used": used, "total": total, "most": most, "most_keys": MOST_KEYS}


def expected(one: dict[str, Any]) -> list[list[int]]:
    """Sequences of the most keys first, and rows past all of them last."""
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
    rest, count = one["total"] - ends_q[-1], -(-(one["total"] - ends_q[-1]) // one["rows"])
    last = begins_k[-1] if one["keys"] else 0
    return tiles + [[len(keys) - 1, len(tiles), count, one["total"], rest, last - 1, -1]] * count


def drawn(seed: int) -> dict[str, Any]:
    chance = Random(seed)
    batch = chance.choice([1, 2, 9, 40])
    queries, keys = ([chance.choice([0, 1, chance.randint(1, 300)]) for _ in range(batch)] for _ in range(2))
    used = [chance.randint(0, 400) for _ in range(batch)] if chance.random() < 0.4 else None
    return case(queries, keys, chance.choice([8, 32, 128]), used, rest=chance.choice([0, 1, 500]))


def listed(case: dict[str, Any]) -> dict[str, Any]:
    """How many tiles were taken, how many there are, their numbers, and what stands after them."""
    starts = [torch.tensor([0, *accumulate(case[name])], dtype=torch.int32) for name in ("queries", "keys")]
    used = torch.tensor(case["used"], dtype=torch.int32) if case["used"] else None
    tiles = torch.full((numbers(case["most"]) + 8,), UNWRITTEN, dtype=torch.int32)
    batch = len(case["queries"])
    cu_q, cu_k = starts if case["keys"] else (starts[0], None)
    launch = list_of_tiles(case["rows"], cu_k is not None, used is not None, early=False)
    launch((batch + 1, 1, 1), tiles, cu_q, cu_k, used, batch, case["total"], case["most_keys"], case["most"])
    head, *rows = tiles.reshape(-1, NUMBERS_OF_TILE).tolist()
    return {
        "taken": head[0],
        "count": head[1],
        "tiles": [row[:7] for row in rows[: case["most"]]],
        "after": rows[case["most"] :],
    }


def test_every_tile_is_listed_once_the_longest_first(interpreted: Interpreter) -> None:
    """One sequence of more tiles than are listed at once, and with the rest more than are compared at once, among them."""
    cases = [
        case([100, 32, 0, 1], [100, 32, 0, 1]),
        case([5], [7]),
        case([5000, 3], [9, 9], rows=8),
        case([3] * 256, [1 + n % 7 for n in range(256)], rows=8, rest=3000),
        case([0, 0], [0, 4], rest=33),
        case([70, 5, 40], [], used=[2000, -1, 899]),  # in pages
        *map(drawn, range(12)),
    ]
    for one, found in zip(cases, interpreted(__file__, json.dumps(cases)), strict=True):
        assert found["taken"] == 0
        assert found["tiles"][: found["count"]] == expected(one)


def test_no_list_is_written_past_its_end(interpreted: Interpreter) -> None:
    """Whatever the lengths say."""
    (found,) = interpreted(__file__, json.dumps([case([100, 90], [100, 90], less=4)]))
    assert found["count"] == len(found["tiles"]) == 4
    assert {number for row in found["after"] for number in row} == {UNWRITTEN}


if __name__ == "__main__":
    print(json.dumps([listed(case) for case in json.loads(sys.argv[1])]))
