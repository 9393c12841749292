"""FlashAttention-3, as the ``fa3-fwd`` wheel brings it: forward only, Hopper, causal aligned bottom-right.

The wheel's build flags decide what it serves (0.0.3 is built without fp16, pages and windows); they are read from the wheel
where it is installed. Caches go through ``flash_attn_with_kvcache``, packed sequences through ``flash_attn_varlen_func``.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput, finish
from flashmoe_science.ops.attention.peers import peer_kernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.peer import launches_of, not_installed

_LACKS = ("FP16", "PAGEDKV", "LOCAL")
_SERVED = ("softcap", "ragged", "packed", "leftpad")
_WHOLE, _HEURISTIC = Config(num_splits=1), Config(num_splits=0)  # 0: split K and V as its own heuristic says


def absent() -> str | None:
    return not_installed("fa3-fwd", "fa3_fwd_interface")


@functools.cache
def _built_without(feature: str) -> bool:
    try:
        config = importlib.import_module("fa3_fwd_config")
    except ModuleNotFoundError:
        return feature in _LACKS  # as in 0.0.3, the version that this project measures
    return bool(config.CONFIG["build_flags"][f"FLASHATTENTION_DISABLE_{feature}"])


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if device is None:
        return "FlashAttention-3 needs a GPU"
    if device.compute_capability != (9, 0):
        return f"FlashAttention-3 is built for Hopper (sm_90); {device.product} is {device.arch}"
    if problem.dtype == "fp32":
        return "FlashAttention-3 takes fp16 and bf16"
    if problem.dtype == "fp16" and _built_without("FP16"):
        return "the fa3-fwd wheel is built without fp16"
    if problem.head_dim != problem.head_dim_v and not (128 < problem.head_dim <= 192 and 96 < problem.head_dim_v <= 128):
        return "FlashAttention-3 needs head_dim_v equal to head_dim, or from 104 to 128 with a head_dim from 136 to 192"
    if problem.head_dim % 8:
        return "FlashAttention-3 needs a head_dim that is a multiple of 8"
    if problem.mask == "causal-topleft":
        return "FlashAttention-3 aligns its causal mask bottom-right"
    if problem.features.page and _built_without("PAGEDKV"):
        return "the fa3-fwd wheel is built without a paged cache"
    if problem.features.window and _built_without("LOCAL"):
        return "the fa3-fwd wheel is built without windows"
    return unsupported(problem.features, (*_SERVED, "page", "window"), "FlashAttention-3")


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Split K and V too where tiles of 128 queries, those of heads that share a key head packed, would leave processors idle:
    its fastest path is what is compared. Lengths on the device it may split whatever the longest are."""
    tiles = problem.batch * problem.heads_kv * -(-problem.seqlen_q * problem.heads // problem.heads_kv // 128)
    idle = device is not None and tiles < device.sm_count
    return (_WHOLE, _HEURISTIC) if idle or problem.features.lengths == "ragged" else (_WHOLE,)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    if inputs.problem.features.lengths != "equal":
        return _run_ragged(inputs, config)
    from fa3_fwd_interface import flash_attn_func

    result = flash_attn_func(
        *(one.transpose(1, 2) for one in inputs.tensors[:3]),
        softmax_scale=inputs.softmax_scale,
        causal=inputs.problem.causal,
        num_splits=config["num_splits"],
        return_attn_probs=inputs.return_lse,
        **_options(inputs),
    )
    out, lse = result if inputs.return_lse else (result, None)
    return finish(inputs, out.transpose(1, 2), lse)


def _options(inputs: AttentionInputs) -> dict[str, Any]:
    """Features that are not defaults: plain calls are made as ever."""
    features = inputs.problem.features
    options: dict[str, Any] = {"softcap": inputs.options.softcap} if features.softcap else {}
    if features.window:
        right = 0 if inputs.problem.causal else features.window_right
        options["window_size"] = tuple(-1 if one is None else one for one in (features.window_left, right))
    return options


def _run_ragged(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    """Through the interface for caches, or, where the keys are packed too, the one for packed sequences."""
    import fa3_fwd_interface as fa3

    tensors, packed = inputs.tensors, inputs.problem.features.lengths == "packed"
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    same = {"softmax_scale": inputs.softmax_scale, "causal": inputs.problem.causal, "num_splits": config["num_splits"]}
    of_q: dict[str, Any] = {"cu_seqlens_q": tensors.cu_seqlens_q, "max_seqlen_q": inputs.options.max_seqlen_q} if packed else {}
    if tensors.cu_seqlens_k is not None:
        of_k = {"cu_seqlens_k": tensors.cu_seqlens_k, "max_seqlen_k": inputs.options.max_seqlen_k}
        options = {**same, **of_q, **of_k, **_options(inputs)}
        result = fa3.flash_attn_varlen_func(q[0], k[0], v[0], return_attn_probs=inputs.return_lse, **options)
    else:
        result = fa3.flash_attn_with_kvcache(
            *(q[0] if packed else q, k, v),
            cache_seqlens=tensors.cache_seqlens,
            page_table=tensors.page_table,
            cache_batch_idx=tensors.cache_batch_idx,
            cache_leftpad=tensors.leftpad,
            return_softmax_lse=inputs.return_lse,
            **same,
            **of_q,
            **_options(inputs),
        )
    out, lse = result[:2] if inputs.return_lse else (result, None)
    out, lse = (out[None], None if lse is None else lse[None]) if packed else (out, lse)
    return finish(inputs, out.transpose(1, 2), lse)


KERNEL = peer_kernel(
    name="fa3",
    about="FlashAttention-3 (fa3-fwd): CUTLASS, warp-specialised, Hopper",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches_of("flash::.*FlashAttnFwd"),
    absent=absent,
    replaces_ours="if allowed",
)
