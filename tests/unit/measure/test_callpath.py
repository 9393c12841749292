"""Whose kernel is it, and is it what was promised? On traces as the profiler writes them."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoe_science.kernels.kernel import Launch
from flashmoe_science.measure.callpath import broken_promises, launches_in
from flashmoe_science.records import SeenLaunch


def mark(index: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"flashmoe-call-{index}", "ts": ts, "dur": dur, "ph": "X"}


def host(ts: float, correlation: int, category: str = "cuda_driver") -> dict[str, Any]:
    return {"cat": category, "name": "cuLaunchKernelEx", "ts": ts, "dur": 2, "args": {"correlation": correlation}}


def device(name: str, ts: float, correlation: int | None = None, category: str = "kernel") -> dict[str, Any]:
    args: dict[str, Any] = {
        "grid": [4, 2, 1],
        "block": [384, 1, 1],
        "shared memory": 232448,
        "registers per thread": 168,
        "stream": 7,
    }
    if correlation is not None:
        args["correlation"] = correlation
    return {"cat": category, "name": name, "ts": ts, "dur": 5, "args": args if category == "kernel" else {}}


def test_a_kernel_belongs_to_the_call_that_launched_it_even_if_it_ran_later() -> None:
    events = [
        mark(0, 100, 50),
        mark(1, 200, 50),
        host(110, 1),
        device("first", 210, 1),
        host(205, 2, "cuda_runtime"),
        device("second", 230, 2),
    ]
    seen = launches_in(events, 2)
    assert [[one.name for one in call] for call in seen] == [["first"], ["second"]]
    assert seen[0][0] == SeenLaunch(
        name="first", grid=(4, 2, 1), block=(384, 1, 1), shared_bytes=232448, registers=168, stream=7
    )


def test_without_correlation_the_time_on_the_device_decides() -> None:
    seen = launches_in([mark(0, 100, 50), mark(1, 200, 50), device("late", 240), device("early", 120)], 2)
    assert [[one.name for one in call] for call in seen] == [["early"], ["late"]]


def test_work_outside_every_call_is_not_counted_and_memory_operations_are() -> None:
    events = [mark(0, 100, 50), device("stray", 90), device("Memset (Device)", 120, category="gpu_memset")]
    (call,) = launches_in(events, 1)
    assert [(one.name, one.grid) for one in call] == [("Memset (Device)", (0, 0, 0))]


def seen(name: str, grid=(4, 2, 1), block=(128, 1, 1), shared_bytes=0) -> SeenLaunch:
    return SeenLaunch(name=name, grid=grid, block=block, shared_bytes=shared_bytes)


PROMISE = (Launch("^flashmoe_fwd$", grid=(4, 2, 1), threads=384, shared_bytes=1000),)
KEPT = seen("flashmoe_fwd", block=(384, 1, 1), shared_bytes=1000)


def test_a_kept_promise_is_kept() -> None:
    assert broken_promises(PROMISE, [KEPT], "ours") == []


@pytest.mark.parametrize(
    ("launched", "words"),
    [
        ([], "no kernel was seen"),
        ([seen("flash_fwd_128_threads")], "promised a kernel named '^flashmoe_fwd$'; saw 'flash_fwd_128_threads'"),
        ([seen("flashmoe_fwd", shared_bytes=1000)], "promised threads a block 384, saw 128"),
        ([seen("flashmoe_fwd", (1, 1, 1), (384, 1, 1), 1000)], "promised grid (4, 2, 1), saw (1, 1, 1)"),
        ([seen("flashmoe_fwd", block=(384, 1, 1))], "promised bytes of shared memory 1000, saw 0"),
        ([KEPT, seen("vectorized_elementwise_kernel")], "launched 'vectorized_elementwise_kernel', which it did not promise"),
        ([KEPT, KEPT], "was launched 2 times"),
    ],
)
def test_what_broke_a_promise_of_ours_is_named(launched: list[SeenLaunch], words: str) -> None:
    broken = broken_promises(PROMISE, launched, "ours")
    assert any(words in reason for reason in broken), broken


def test_a_peer_may_pad_but_not_run_something_else() -> None:
    promise = (Launch("flash_fwd"),)
    assert broken_promises(promise, [seen("pad"), seen("pytorch_flash::flash_fwd_kernel"), seen("combine")], "peer") == []
    assert broken_promises(promise, [seen("pad"), seen("fmha_cutlassF")], "peer") != []


def test_two_promised_launches_of_one_name_are_two_launches() -> None:
    promise = (Launch("^split$", grid=(8, 1, 1)), Launch("^split$", grid=(1, 1, 1)))
    both = [seen("split", (8, 1, 1)), seen("split", (1, 1, 1))]
    assert broken_promises(promise, both, "ours") == []
    assert broken_promises(promise, both[:1], "ours") != []
