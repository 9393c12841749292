"""What a kernel or a function promises, held against what a call launched and how fast it was."""

from __future__ import annotations

import math

import pytest

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.measure.promises import Promises, broken_launches
from flashmoe_science.operations import operation, parse_problem
from flashmoe_science.records import SeenLaunch

ATTENTION = operation("attention")
FAMILIES = ATTENTION.contract().families


def broken(promised: tuple[Launch, ...], launched: list[SeenLaunch], origin: str) -> list[str]:
    """What one call broke."""
    return broken_launches(promised, [launched], origin, FAMILIES)


def seen(name: str, grid=(4, 2, 1), block=(128, 1, 1), shared_bytes=0) -> SeenLaunch:
    return SeenLaunch(name=name, grid=grid, block=block, shared_bytes=shared_bytes)


PROMISE = (Launch("^flashmoe_fwd$", (4, 2, 1), threads=384, shared_bytes=1000, cluster=(2, 1, 1), registers=168),)
KEPT = SeenLaunch(name="flashmoe_fwd", grid=(4, 2, 1), block=(384, 1, 1), shared_bytes=1000, registers=168)


def test_a_kept_promise_is_kept() -> None:
    assert broken(PROMISE, [KEPT], "ours") == []
    assert broken(PROMISE, [KEPT.model_copy(update={"cluster": (2, 1, 1)})], "ours") == []


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
    found = broken(PROMISE, launched, "ours")
    assert any(words in reason for reason in found), found


def test_a_peer_may_pad_but_not_run_something_else() -> None:
    promise = (Launch("flash_fwd"),)
    assert broken(promise, [seen("pad"), seen("pytorch_flash::flash_fwd_kernel"), seen("combine")], "peer") == []
    assert broken(promise, [seen("pad"), seen("fmha_cutlassF")], "peer") != []


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
    peer = next(kernel for kernel in ATTENTION.peers() if kernel.name == name)
    promise = peer.launches(parse_problem("attn b1 h1 q64 d64 fp16"), Config(), gpu_named("h200"))
    own = seen(OWN_KERNEL_OF[name])
    assert broken(promise, [seen("pad"), own], "peer") == []
    for other, kernel in OWN_KERNEL_OF.items():
        if other == name:
            continue
        assert any(f"saw {kernel[:40]!r}"[:-1] in reason for reason in broken(promise, [seen(kernel)], "peer")), other
        if other != "sdpa_math":  # a softmax besides may well be a part of another's work
            assert any("which it did not promise" in one for one in broken(promise, [own, seen(kernel)], "peer")), other


def test_a_function_may_launch_what_it_did_not_promise() -> None:
    promises = Promises.of({"kernel": "fast", "threads": 128, "grid": [4, 2, 1], "shared_bytes": 0})
    assert broken(promises.launches, [seen("fill"), seen("fast_kernel")], "candidate") == []
    (reason,) = broken(promises.launches, [seen("fast_kernel", block=(384, 1, 1))], "candidate")
    assert "promised threads a block 128, saw 384" in reason


def test_a_users_call_must_launch_the_very_build_that_is_timed() -> None:
    promise = (Launch("^fwd$", (4, 2, 1), threads=128),)
    planned = SeenLaunch(name="fwd", grid=(4, 2, 1), block=(128, 1, 1), shared_bytes=1000, registers=168, stream=7)

    def of_both(by_user: SeenLaunch) -> list[str]:
        return broken_launches(promise, [[planned], [by_user]], "ours", FAMILIES)

    assert of_both(planned.model_copy(update={"stream": 13})) == []  # strays are named by themselves
    assert of_both(planned.model_copy(update={"registers": 255, "shared_bytes": 0})) == [
        "called by a user: 'fwd' with shared_bytes 0, where the planned call has 1000",
        "called by a user: 'fwd' with registers 255, where the planned call has 168",
    ]


def test_two_promised_launches_of_one_name_are_two_launches() -> None:
    promise = (Launch("^split$", grid=(8, 1, 1)), Launch("^split$", grid=(1, 1, 1)))
    both = [seen("split", (8, 1, 1)), seen("split", (1, 1, 1))]
    assert broken(promise, both, "ours") == []
    assert broken(promise, both[:1], "ours") != []


@pytest.mark.parametrize(("measured", "missed"), [(0.12, True), (0.84, True), (0.86, False), (1.7, False), (3.5, True)])
def test_a_speed_up_may_be_half_to_twice_what_was_expected(measured: float, missed: bool) -> None:
    own = [1000, 1010, 990]
    reason = Promises(speedup=1.7).speedup_missed(own, [round(one * measured) for one in own], "sdpa")
    assert (reason is not None) == missed
    if missed:
        assert f"measured against sdpa: {measured:.3g} times" in str(reason)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["fast"], "promises is ['fast']: Input should be a valid dictionary"),
        ({"speed": 2}, "promises['speed'] is 2: Extra inputs are not permitted"),
        ({"threads": "many"}, "promises['threads'] is 'many': Input should be a valid integer"),
        ({"threads": -128}, "Input should be greater than or equal to 1"),
        ({"grid": [1, 2]}, "promises['grid'][2] is (1, 2): Field required"),
        ({"kernel": "fast["}, "it is no pattern"),
        ({"deterministic": 1}, "Input should be a valid boolean"),
        ({"speedup": math.nan}, "promises['speedup'] is nan: Input should be"),
        ({"speedup": 0}, "Input should be greater than 0"),
    ],
)
def test_a_promise_that_is_none_is_refused_in_one_line(said: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Promises.of(said)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
