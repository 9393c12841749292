"""Lists of the tiles of packed sequences, in Triton's interpreter (run with TRITON_INTERPRET=1).

Of each case in the JSON argument: how many tiles were dealt out, how many there are, their numbers, and what stands after them.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from typing import Any

import torch

from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import NUMBERS_OF_TILE, list_of_tiles, numbers

UNWRITTEN = -7


def listed(case: dict[str, Any]) -> dict[str, Any]:
    starts = [torch.tensor([0, *accumulate(case[name])], dtype=torch.int32) for name in ("queries", "keys")]
    used = torch.tensor(case["used"], dtype=torch.int32) if case["used"] else None
    tiles = torch.full((numbers(case["most"]) + 8,), UNWRITTEN, dtype=torch.int32)
    batch = len(case["queries"])
    cu_q, cu_k = starts if case["keys"] else (starts[0], None)
    launch = list_of_tiles(case["rows"], cu_k is not None, used is not None, early=False)
    launch((batch, 1, 1), tiles, cu_q, cu_k, used, batch, case["most_keys"], case["most"])
    head, *rows = tiles.reshape(-1, NUMBERS_OF_TILE).tolist()
    return {
        "taken": head[0],
        "count": head[1],
        "tiles": [row[:7] for row in rows[: case["most"]]],
        "after": rows[case["most"] :],
    }


if __name__ == "__main__":
    print(json.dumps([listed(case) for case in json.loads(sys.argv[1])]))
