"""FlashAttention-3, as the ``fa3-fwd`` wheel brings it: forward only, Hopper, causal aligned bottom-right.

The wheel's build flags decide what it serves (0.0.3 is built without fp16); they are read from the wheel where it is installed.
"""

from __future__ import annotations

import functools
import importlib

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionKernel, AttentionOutput, finish
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.peer import not_installed

_WHOLE, _HEURISTIC = Config(num_splits=1), Config(num_splits=0)  # 0: split K and V as its own heuristic says


def absent() -> str | None:
    return not_installed("fa3-fwd", "fa3_fwd_interface")


@functools.cache
def _built_without_fp16() -> bool:
    try:
        config = importlib.import_module("fa3_fwd_config")
    except ModuleNotFoundError:
        return True  # as in 0.0.3, the version that this project measures
    return bool(config.CONFIG["build_flags"]["FLASHATTENTION_DISABLE_FP16"])


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlashAttention-3 needs a GPU"
    if device.compute_capability != (9, 0):
        return f"FlashAttention-3 is built for Hopper (sm_90); {device.product} is {device.arch}"
    if problem.dtype == "fp32":
        return "FlashAttention-3 takes fp16 and bf16"
    if problem.dtype == "fp16" and _built_without_fp16():
        return "the fa3-fwd wheel is built without fp16"
    if problem.head_dim != problem.head_dim_v:
        return "FlashAttention-3 is measured only where head_dim_v equals head_dim"
    if problem.head_dim % 8:
        return "FlashAttention-3 needs a head_dim that is a multiple of 8"
    if problem.mask == "causal-topleft":
        return "FlashAttention-3 aligns its causal mask bottom-right"
    return None


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Split K and V too where tiles of 128 queries would leave processors idle: its fastest path is what is compared."""
    tiles = problem.batch * problem.heads * -(-problem.seqlen_q // 128)
    return (_WHOLE, _HEURISTIC) if device is not None and tiles < device.sm_count else (_WHOLE,)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    from fa3_fwd_interface import flash_attn_func

    result = flash_attn_func(
        inputs.q.transpose(1, 2),
        inputs.k.transpose(1, 2),
        inputs.v.transpose(1, 2),
        softmax_scale=inputs.softmax_scale,
        causal=inputs.problem.causal,
        num_splits=config["num_splits"],
        return_attn_probs=inputs.return_lse,
    )
    out, lse = result if inputs.return_lse else (result, None)
    return finish(inputs, out.transpose(1, 2), lse)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return (Launch("flash::.*FlashAttnFwd"),)


KERNEL = AttentionKernel(
    name="fa3",
    origin="peer",
    op="attention",
    about="FlashAttention-3 (fa3-fwd): CUTLASS, warp-specialised, Hopper",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    absent=absent,
)
