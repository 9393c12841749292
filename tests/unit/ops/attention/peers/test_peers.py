"""Peers as kernels: what they claim, what they refuse, and that PyTorch's own are right where they run on a CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tests.unit.ops.attention.held import expected_of, inputs_of, reasons

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.front.kernels import PEERS

BY_NAME = {kernel.name: kernel for kernel in PEERS}
H200, L4 = gpu_named("h200"), gpu_named("l4")
DECODING = ("flashinfer_xqa", "flashinfer_fa2")  # peers that take a few queries only


def test_names_are_unique_and_every_peer_is_one() -> None:
    pytorchs = ["sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"]
    assert list(BY_NAME) == [*pytorchs, "fa3", "fa4", *DECODING, "flex"]
    assert {kernel.origin for kernel in PEERS} == {"peer"}


def test_importing_the_peers_imports_none_of_their_libraries() -> None:
    code = (
        "import sys, flashmoe_science.ops.attention.front.kernels; "
        "print([m for m in ('torch', 'triton', 'flash_attn', 'flashinfer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math"])
@pytest.mark.parametrize(
    "text",
    [
        "attn b1 h2 q65 d64 fp32",
        "attn b1 h2 q65 d64 bf16 causal",
        "attn b2 h4 hk2 q20 d16 fp32 causal bshd",
        "attn b1 h2 q20 k50 d16 fp32 causal-topleft",
        "attn b1 h2 q50 k20 dv8 d16 fp32 causal-topleft",
    ],
)
def test_pytorch_on_the_cpu_is_right(name: str, text: str) -> None:
    problem = parse_problem(text)
    kernel = BY_NAME[name]
    assert kernel.supports(problem, None) is None
    inputs = inputs_of(str(problem), seed=2)
    output = kernel.run(inputs, kernel.configs(problem, None)[0])
    assert reasons((output.out, output.lse), expected_of(inputs)) == []


def test_bottom_right_causal_is_not_pytorchs_is_causal() -> None:
    problem = parse_problem("attn b1 h2 q20 k50 d16 fp32 causal")
    inputs = inputs_of(str(problem), seed=2)
    kernel = BY_NAME["sdpa"]
    output = kernel.run(inputs, kernel.configs(problem, None)[0])
    assert reasons((output.out, output.lse), expected_of(inputs)) == []


def test_a_given_output_is_written_and_returned() -> None:
    problem = parse_problem("attn b1 h2 q8 d16 fp32")
    inputs = inputs_of(str(problem), seed=2)
    given = torch.full((1, 2, 8, 16), torch.nan)
    result = BY_NAME["sdpa"].run(replace(inputs, out=given), BY_NAME["sdpa"].configs(problem, None)[0])
    assert result.out is given
    assert torch.isfinite(given).all()


@pytest.mark.parametrize(
    ("name", "text", "gpu", "words"),
    [
        ("sdpa", "attn b1 h1 q9 k4 d64 bf16 causal", "h200", "no key"),
        ("sdpa_flash", "attn b1 h1 q9 d64 fp32", "h200", "fp16 and bf16"),
        ("sdpa_flash", "attn b1 h1 q9 k12 d64 bf16 causal-topleft", "h200", "top-left"),
        ("sdpa_flash", "attn b1 h1 q9 d64 dv32 bf16", "h200", "head_dim_v"),
        ("sdpa_cudnn", "attn b1 h1 q9 d4 bf16", "h200", "multiples of 8"),
        ("sdpa_cudnn", "attn b1 h1 q9 d256 bf16", "l4", "up to 128"),
        ("sdpa_efficient", "attn b1 h4 hk2 q9 d64 bf16", "h200", "share"),
        ("sdpa_math", "attn b4 h128 q65536 d64 bf16", "l4", "GiB"),
        ("fa3", "attn b1 h1 q9 d64 bf16", "l4", "Hopper"),
        ("fa3", "attn b1 h1 q9 d64 fp16", "h200", "without fp16"),
        ("fa3", "attn b1 h1 q9 k12 d64 bf16 causal-topleft", "h200", "bottom-right"),
        ("fa3", "attn b1 h1 q9 d192 dv96 bf16", "h200", "head_dim_v"),
        ("fa4", "attn b1 h1 q9 d60 bf16", "h200", "multiples of 8"),
        ("fa4", "attn b1 h1 q9 d192 bf16", "b200", "up to 128"),
        ("fa4", "attn b1 h1 q9 d64 bf16", "a100", "Hopper or newer"),
        ("flex", "attn b1 h1 q9 d8 bf16", "h200", "16 or more"),
    ],
)
def test_what_a_peer_cannot_do_is_refused_in_words(name: str, text: str, gpu: str, words: str) -> None:
    reason = BY_NAME[name].supports(parse_problem(text), gpu_named(gpu))
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


def test_every_peer_serves_the_plain_case_on_an_h200_but_those_for_decoding() -> None:
    problem = parse_problem("attn b4 h16 q4096 d128 bf16 causal bshd")
    reasons = {kernel.name: kernel.supports(problem, H200) for kernel in PEERS}
    assert {name for name, reason in reasons.items() if reason is not None} == set(DECODING)


def test_fa3_and_fa4_serve_values_narrower_than_keys_as_deepseek_has_them() -> None:
    problem = parse_problem("attn b2 h16 q8192 d192 dv128 bf16 causal bshd")
    assert [BY_NAME[name].supports(problem, H200) for name in ("fa3", "fa4")] == [None, None]


def test_only_pytorchs_choice_and_plain_maths_run_on_a_cpu() -> None:
    problem = parse_problem("attn b1 h2 q8 d16 fp32")
    assert [kernel.name for kernel in PEERS if kernel.supports(problem, None) is None] == ["sdpa", "sdpa_math"]


def test_fa3_is_also_tried_split_where_it_would_leave_the_gpu_idle() -> None:
    few, many = parse_problem("attn b1 h1 q128 d64 bf16"), parse_problem("attn b8 h16 q2048 d64 bf16")
    assert [str(config) for config in BY_NAME["fa3"].configs(few, H200)] == ["num_splits=1", "num_splits=0"]
    assert [str(config) for config in BY_NAME["fa3"].configs(many, H200)] == ["num_splits=1"]


@pytest.mark.parametrize(
    ("name", "launched"),
    [
        ("sdpa_flash", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"),
        ("sdpa_flash", "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)"),
        ("sdpa_cudnn", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"),
        ("sdpa_efficient", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)"),
        ("sdpa", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"),
        ("sdpa_math", "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>(float*)"),
        ("fa3", "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>"),
        ("fa4", "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16"),
        (
            "flashinfer_xqa",
            "kernel_mha(unsigned int, float, float const*, Vec<__nv_bfloat16, 128u>*, KVCacheList<true>, void*)",
        ),
        ("flashinfer_fa2", "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(MaskMode)0, 16u>>"),
        ("flex", "triton_tem_fused_flex_attention_0"),
    ],
)
def test_promised_names_match_what_such_kernels_are_called(name: str, launched: str) -> None:
    import re

    kernel, problem = BY_NAME[name], parse_problem("attn b4 h16 q4096 d128 bf16")
    for launch in kernel.launches(problem, kernel.configs(problem, H200)[0], H200):
        assert re.search(launch.name, launched)


def test_one_backends_promise_is_not_kept_by_another() -> None:
    import re

    problem = parse_problem("attn b4 h16 q4096 d128 bf16")
    cudnn = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
    for name in ("sdpa_flash", "sdpa_efficient", "sdpa_math", "fa3", "fa4", *DECODING, "flex"):
        (launch,) = BY_NAME[name].launches(problem, BY_NAME[name].configs(problem, H200)[0], H200)
        assert not re.search(launch.name, cudnn)
