"""FlashAttention-4 (``flash-attn-4``): CuTe DSL, compiled on first use, causal aligned bottom-right.

Windows, caps, sinks, packed sequences, and caches of ragged lengths, contiguous or paged, are its own arguments. On Hopper it
does not split keys. The log-sum-exp has the sinks in it, as ours has.
"""

from __future__ import annotations

from typing import Any

from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput, finish
from flashmoe_science.ops.attention.peers import peer_kernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import launches_of, not_installed

_MAJORS = (9, 10, 11, 12)  # compute capabilities that 4.0.0b36 has kernels for
_SERVED = ("window", "softcap", "sinks", "ragged", "packed", "page")
ON_DISK = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def absent() -> str | None:
    return not_installed("flash-attn-4", "flash_attn.cute")


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlashAttention-4 needs a GPU"
    if device.compute_capability[0] not in _MAJORS:
        return f"FlashAttention-4 needs Hopper or newer; {device.product} is {device.arch}"
    if problem.dtype == "fp32":
        return "FlashAttention-4 takes fp16 and bf16"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "FlashAttention-4 needs head dimensions that are multiples of 8"
    dims = (problem.head_dim, problem.head_dim_v)
    if device.compute_capability[0] != 9 and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
        return f"FlashAttention-4 takes head dimensions up to 128, (192, 128) and (256, 256) on {device.product}"
    if problem.mask == "causal-topleft":
        return "FlashAttention-4 aligns its causal mask bottom-right"
    return unsupported(problem.features, _SERVED, "FlashAttention-4")


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    if inputs.problem.features.lengths != "equal":
        return _run_ragged(inputs)
    from flash_attn.cute import flash_attn_func

    out, lse = flash_attn_func(
        *(one.transpose(1, 2) for one in inputs.tensors[:3]),
        softmax_scale=inputs.softmax_scale,
        causal=inputs.problem.causal,
        return_lse=inputs.return_lse,
        **_options(inputs),
    )
    return finish(inputs, out.transpose(1, 2), lse if inputs.return_lse else None)


def _options(inputs: AttentionInputs) -> dict[str, Any]:
    """Features that are not defaults: plain calls are made as ever."""
    features, tensors = inputs.problem.features, inputs.tensors
    options: dict[str, Any] = {}
    if features.window:
        options["window_size"] = (features.window_left, features.window_right)
    if features.softcap:
        options["softcap"] = inputs.options.softcap
    if features.sinks:
        options["learnable_sink"] = tensors.sinks
    return options


def _run_ragged(inputs: AttentionInputs) -> AttentionOutput:
    from flash_attn.cute import flash_attn_varlen_func

    packed, tensors = inputs.problem.features.lengths == "packed", inputs.tensors
    if tensors.cache_batch_idx is not None:
        raise CannotServe("FlashAttention-4 takes no index of cache rows")
    rows = inputs.q.transpose(1, 2)
    caches = [tensor.transpose(1, 2) for tensor in (inputs.k, inputs.v)]
    k, v = (tensor if tensors.cu_seqlens_k is None else tensor[0] for tensor in caches)
    lengths: dict[str, Any] = {}
    if packed:
        lengths = {"cu_seqlens_q": tensors.cu_seqlens_q, "max_seqlen_q": inputs.options.max_seqlen_q}
    out, lse = flash_attn_varlen_func(
        *(rows[0] if packed else rows, k, v),
        cu_seqlens_k=tensors.cu_seqlens_k,
        max_seqlen_k=inputs.options.max_seqlen_k,
        seqused_k=tensors.cache_seqlens,
        page_table=tensors.page_table,
        softmax_scale=inputs.softmax_scale,
        causal=inputs.problem.causal,
        return_lse=inputs.return_lse,
        **lengths,
        **_options(inputs),
    )
    out, lse = (out[None], None if lse is None else lse[None]) if packed else (out, lse)
    return finish(inputs, out.transpose(1, 2), lse if inputs.return_lse else None)


KERNEL = peer_kernel(
    name="fa4",
    about="FlashAttention-4 (flash-attn-4): CuTe DSL, Hopper and Blackwell",
    supports=supports,
    run=run,
    launches=launches_of("^(?!.*(pytorch_flash|flash::))(?i:.*(flash_?attn|flash_?attention|flash_?fwd))"),
    absent=absent,
    on_disk=ON_DISK,
    replaces_ours="if allowed",
)
