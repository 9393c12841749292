"""A profiler's trace, sorted by call: which kernels each launched, and what strayed. On traces as the profiler writes them."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoe_science.kernel import Launch
from flashmoe_science.measure.launches.trace import launches_in
from flashmoe_science.measure.promises import broken_launches
from flashmoe_science.records import SeenLaunch


def mark(index: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"flashmoe-call-{index}", "ts": ts, "dur": dur, "ph": "X"}


def host(ts: float, correlation: int, category: str = "cuda_driver", tid: int = 1) -> dict[str, Any]:
    return {"cat": category, "name": "cuLaunchKernelEx", "ts": ts, "dur": 2, "tid": tid, "args": {"correlation": correlation}}


def device(name: str, ts: float, correlation: int | None = None, category: str = "kernel", stream: int = 7) -> dict[str, Any]:
    args: dict[str, Any] = {
        "grid": [4, 2, 1],
        "block": [384, 1, 1],
        "shared memory": 232448,
        "registers per thread": 168,
        "stream": stream,
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


def test_work_outside_every_call_is_not_counted_and_memory_operations_are() -> None:
    events = [mark(0, 100, 50), device("stray", 90), device("Memset (Device)", 120, category="gpu_memset")]
    (call,) = launches_in(events, 1)
    assert [(one.name, one.grid) for one in call] == [("Memset (Device)", (0, 0, 0))]


OWN = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>>"


def home(ts: float, correlation: int) -> list[dict[str, Any]]:
    """The kernel of our own that shows the caller's stream (7) and thread (1)."""
    mark = {"cat": "user_annotation", "name": "flashmoe-home", "ts": ts, "dur": 20, "ph": "X"}
    return [mark, host(ts + 2, correlation, "cuda_runtime"), device(OWN, ts + 6, correlation)]


def test_work_of_a_call_on_its_callers_stream_and_thread_has_not_strayed() -> None:
    events = [*home(50, 90), mark(0, 100, 50), host(110, 1), device("it", 120, 1), *home(160, 91)]
    assert [[(one.name, one.strayed) for one in call] for call in launches_in(events, 1)] == [[("it", None)]]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([host(110, 1), device("it", 120, 1, stream=13)], "on stream 13, where its caller's is 7"),
        ([host(110, 1, tid=2), device("it", 120, 1)], "from another thread"),
        ([host(155, 1), device("it", 156, 1)], "after its call had been waited for"),
        (
            [host(155, 1, tid=2), device("it", 300, 1, stream=13)],
            "on stream 13, where its caller's is 7 and from another thread and after its call had been waited for",
        ),
        ([host(164, 1, tid=2), device("elementwise it", 170, 1)], "from another thread and after its call had been waited for"),
    ],
    ids=["stream", "thread", "late", "all", "beside our own kernel"],
)
def test_work_elsewhere_is_the_calls_own_and_named(events: list[dict[str, Any]], words: str) -> None:
    ((launch,),) = launches_in([*home(50, 90), mark(0, 100, 50), *home(160, 91), *events], 1)
    assert launch.strayed == words
    for origin in ("ours", "peer", "candidate"):
        assert f"launched {launch.name!r} {words}" in broken_launches((Launch("it"),), [[launch]], origin, {})


def test_a_cluster_is_read_where_the_trace_has_one() -> None:
    with_cluster = device("it", 120)
    with_cluster["args"]["cluster"] = [2, 1, 1]
    ((launch,),) = launches_in([mark(0, 100, 50), with_cluster], 1)
    assert launch.cluster == (2, 1, 1)
