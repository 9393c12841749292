"""Calls with right and wrong lengths by our kernel in Triton's interpreter, as with FLASHMOE_CHECK=1 on a GPU.

Run as a script with TRITON_INTERPRET=1 it prints one JSON object: by case, whether a right call is served, new and stored, with
which words a wrong one is refused, and how often the kernel that checks is launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from tests.unit.tensors import i32

from flashmoe_science import flash_attn_varlen_func as varlen
from flashmoe_science import flash_attn_with_kvcache as cache
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops import calls
from flashmoe_science.ops.attention.device import check_triton
from flashmoe_science.ops.attention.front import append, choose, lengths

Given = dict[str, Any]
LAUNCHES: list[int] = []


def cached(**others: Any) -> Given:
    q, caches = torch.randn(2, 1, 4, 16), (torch.randn(6, 8, 2, 16), torch.randn(6, 8, 2, 16))
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": i32(3, 6), "kernel": "split_triton"} | others


def appended(**others: Any) -> Given:
    return cached(k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16)) | others


def packed(**others: Any) -> Given:
    q, k, v = (torch.randn(n, h, 16) for n, h in ((6, 4), (9, 2), (9, 2)))
    starts = {"cu_seqlens_q": i32(0, 3, 6), "cu_seqlens_k": i32(0, 4, 9), "max_seqlen_q": 3, "max_seqlen_k": 5}
    return {"q": q, "k": k, "v": v, "kernel": "split_triton"} | starts | others


TABLE, ROTARY = i32(5, 2, 0, 4).view(2, 2), {"rotary_cos": torch.randn(9, 8), "rotary_sin": torch.randn(9, 8)}
# By name: the function, its right arguments, what makes them wrong, and how the refusal begins.
CASES: dict[str, tuple[Callable[..., Any], Given, Given, str]] = {
    "lengths": (cache, cached(), {"cache_seqlens": i32(3, 9)}, "cache_seqlens is 9 for sequence 1"),
    "a length": (cache, cached(cache_seqlens=5), {"cache_seqlens": 9}, "cache_seqlens is 9 for sequence 0"),
    "rows": (cache, cached(cache_batch_idx=i32(5, 1)), {"cache_batch_idx": i32(5, 6)}, "cache_batch_idx is 6 for sequence 1"),
    "leftpad": (cache, cached(cache_leftpad=i32(2, 0)), {"cache_leftpad": i32(2, -1)}, "cache_leftpad is -1 for sequence 1"),
    "pages": (
        cache,
        cached(page_table=TABLE, cache_seqlens=i32(3, 11)),
        {"page_table": i32(5, -1, 0, 6).view(2, 2)},
        "page_table is 6 for sequence 1 at 1, where it has keys; it must be from 0 to 5",
    ),
    "append": (cache, appended(), {"cache_seqlens": i32(3, 8)}, "cache_seqlens is 8 for sequence 1, which gets"),
    "rotary": (cache, appended(**ROTARY), {"rotary_seqlens": i32(3, 9)}, "rotary_cos has 9 positions and"),
    "packed": (varlen, packed(), {"cu_seqlens_k": i32(0, 5, 4)}, "cu_seqlens_k falls from 5 to 4 at"),
    "longest": (varlen, packed(), {"cu_seqlens_q": i32(0, 2, 6)}, "max_seqlen_q is 3 and sequence 1 has 4"),
    "used keys": (varlen, packed(seqused_k=i32(4, 5)), {"seqused_k": i32(5, 5)}, "seqused_k is 5 for sequence 0; it must be"),
}  # fmt: skip


def words_of(function: Callable[..., Any], given: Given) -> str:
    """With which words the call is refused, "" where it is served."""
    LAUNCHES.clear()
    try:
        function(**given)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    torch.manual_seed(0)
    choose.gpu_of = append.gpu_of = lambda q: gpu_named("l4")
    lengths._are_on_gpu = lambda tensors: True
    torch.cuda.is_current_stream_capturing = lambda: False
    check = check_triton.is_wrong
    check_triton.is_wrong = lambda one: LAUNCHES.append(1) or check(one)
    report = {}
    for case, (function, right, wrong, expected) in CASES.items():
        calls.LAUNCHES.clear()
        lengths.CHECK = False
        function(**right)
        without = words_of(function, right | wrong) + "".join(map(str, LAUNCHES))
        calls.LAUNCHES.clear()
        lengths.CHECK = True
        served = [words_of(function, right) == "", words_of(function, right) == ""]
        launches = [len(LAUNCHES)]
        refused = []
        for _ in range(2):
            refused.append(words_of(function, right | wrong))
            launches.append(len(LAUNCHES))
        report[case] = {
            "served": served, "without": without, "refused": refused, "expected": expected, "launches": launches,
        }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
