"""Whose kernel is it, and is it what was promised? On traces as the profiler writes them."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.measure.callpath import broken_promises, launches_in, other_launches
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.peers import PEERS
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


def test_without_correlation_the_time_on_the_device_decides() -> None:
    seen = launches_in([mark(0, 100, 50), mark(1, 200, 50), device("late", 240), device("early", 120)], 2)
    assert [[one.name for one in call] for call in seen] == [["early"], ["late"]]


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
        assert f"launched {launch.name!r} {words}" in broken_promises((Launch("it"),), [launch], origin)


def test_a_cluster_is_read_where_the_trace_has_one() -> None:
    with_cluster = device("it", 120)
    with_cluster["args"]["cluster"] = [2, 1, 1]
    ((launch,),) = launches_in([mark(0, 100, 50), with_cluster], 1)
    assert launch.cluster == (2, 1, 1)


def seen(name: str, grid=(4, 2, 1), block=(128, 1, 1), shared_bytes=0) -> SeenLaunch:
    return SeenLaunch(name=name, grid=grid, block=block, shared_bytes=shared_bytes)


PROMISE = (Launch("^flashmoe_fwd$", (4, 2, 1), threads=384, shared_bytes=1000, cluster=(2, 1, 1), registers=168),)
KEPT = SeenLaunch(name="flashmoe_fwd", grid=(4, 2, 1), block=(384, 1, 1), shared_bytes=1000, registers=168)


def test_a_kept_promise_is_kept() -> None:
    assert broken_promises(PROMISE, [KEPT], "ours") == []
    assert broken_promises(PROMISE, [KEPT.model_copy(update={"cluster": (2, 1, 1)})], "ours") == []


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
        ([KEPT.model_copy(update={"registers": 255})], "promised registers a thread 168, saw 255"),
        ([KEPT.model_copy(update={"cluster": (1, 1, 1)})], "promised cluster (2, 1, 1), saw (1, 1, 1)"),
    ],
)
def test_what_broke_a_promise_of_ours_is_named(launched: list[SeenLaunch], words: str) -> None:
    broken = broken_promises(PROMISE, launched, "ours")
    assert any(words in reason for reason in broken), broken


def test_a_peer_may_pad_but_not_run_something_else() -> None:
    promise = (Launch("flash_fwd"),)
    assert broken_promises(promise, [seen("pad"), seen("pytorch_flash::flash_fwd_kernel"), seen("combine")], "peer") == []
    assert broken_promises(promise, [seen("pad"), seen("fmha_cutlassF")], "peer") != []


# As an H200 shows them.
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>>"
EFFICIENT = "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>)"
FA3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o11101213"
FLEX = "triton_tem_fused_flex_attention_0"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 7, false, false>"
OWN_KERNEL_OF = {
    "sdpa_cudnn": CUDNN, "sdpa_flash": FLASH, "sdpa_efficient": EFFICIENT, "fa3": FA3, "fa4": FA4, "flex": FLEX,
    "sdpa_math": SOFTMAX,
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_KERNEL_OF)
def test_a_fallback_inside_a_library_is_named(name: str) -> None:
    """Each peer, told by its own promise from every other's kernel: alone in its place, and launched besides."""
    peer = next(kernel for kernel in PEERS if kernel.name == name)
    promise = peer.launches(parse_problem("attn b1 h1 q64 d64 fp16"), Config(), gpu_named("h200"))
    own = seen(OWN_KERNEL_OF[name])
    assert broken_promises(promise, [seen("pad"), own], "peer") == []
    for other, kernel in OWN_KERNEL_OF.items():
        if other == name:
            continue
        assert any(f"saw {kernel[:40]!r}"[:-1] in reason for reason in broken_promises(promise, [seen(kernel)], "peer")), other
        if other != "sdpa_math":  # a softmax besides may well be a part of another's work
            assert any("which it did not promise" in one for one in broken_promises(promise, [own, seen(kernel)], "peer")), (
                other
            )


def test_a_users_call_must_launch_the_very_build_that_is_timed() -> None:
    planned = SeenLaunch(name="fwd", grid=(4, 2, 1), block=(128, 1, 1), shared_bytes=1000, registers=168, stream=7)
    assert other_launches([planned], [planned.model_copy(update={"stream": 13})]) == []  # strays are named by themselves
    other = planned.model_copy(update={"registers": 255, "shared_bytes": 0})
    assert other_launches([planned], [other]) == [
        "'fwd' with shared_bytes 0, where the planned call has 1000",
        "'fwd' with registers 255, where the planned call has 168",
    ]


def test_two_promised_launches_of_one_name_are_two_launches() -> None:
    promise = (Launch("^split$", grid=(8, 1, 1)), Launch("^split$", grid=(1, 1, 1)))
    both = [seen("split", (8, 1, 1)), seen("split", (1, 1, 1))]
    assert broken_promises(promise, both, "ours") == []
    assert broken_promises(promise, both[:1], "ours") != []
