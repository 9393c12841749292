"""The public function that a user calls for a problem, as the eager clock times it: FlashAttention's names, or PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmoe_science.operations import public
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.features import PLAIN

UserCall = Callable[[AttentionInputs], AttentionOutput]

# What each function has an argument for, besides lengths.
_OF_FLASH = ("window", "softcap", "alibi")
_OF_SDPA = ("boolmask", "bias")
_OF_CACHES = ("window", "softcap", "sinks", "alibi", "ragged", "packed", "page", "leftpad", "fp8kv")


def public_call(problem: AttentionProblem, kernel: str) -> UserCall | None:
    """The function for the problem, asked to be served by ``kernel``; None where no public function has the arguments, or where
    its bound on the lengths, the whole pages of a table, is another than the longest."""
    kinds = set(problem.features.kinds())
    if problem.features.page and problem.seqlen_k % problem.features.page:
        return None
    if problem.features == PLAIN or (kinds <= set(_OF_SDPA) and not problem.causal):
        return None if problem.mask == "causal" and problem.seqlen_q != problem.seqlen_k else _by_sdpa(problem, kernel)
    if kinds <= set(_OF_FLASH) and problem.mask != "causal-topleft":
        return _by_flash(problem, kernel)
    if kinds <= set(_OF_CACHES) and problem.features.lengths != "equal":
        packed = problem.features.lengths == "packed" and not problem.features.page
        return _by_varlen(problem, kernel) if packed else _by_cache(problem, kernel)
    return None


def _by_sdpa(problem: AttentionProblem, kernel: str) -> UserCall:
    scaled_dot_product_attention = public("flashmoe_science.attention:scaled_dot_product_attention")
    causal, grouped = problem.causal, problem.heads != problem.heads_kv

    def call(inputs: AttentionInputs) -> AttentionOutput:
        return AttentionOutput(
            scaled_dot_product_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                attn_mask=inputs.tensors.bias,
                is_causal=causal,
                scale=inputs.softmax_scale,
                enable_gqa=grouped,
                kernel=kernel,
            )
        )

    return call


def _window(problem: AttentionProblem) -> tuple[int, int]:
    left, right = problem.features.window_left, problem.features.window_right
    return (-1 if left is None else left, -1 if right is None else right)


def _options(problem: AttentionProblem, inputs: AttentionInputs) -> dict[str, Any]:
    tensors = inputs.tensors
    return {
        "softmax_scale": inputs.softmax_scale,
        "causal": problem.causal,
        "window_size": _window(problem),
        "softcap": inputs.options.softcap,
        "alibi_slopes": tensors.alibi_slopes,
    }


def _by_flash(problem: AttentionProblem, kernel: str) -> UserCall:
    flash_attn_func = public("flashmoe_science.attention:flash_attn_func")

    def call(inputs: AttentionInputs) -> AttentionOutput:
        q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
        out: Any = flash_attn_func(q, k, v, kernel=kernel, **_options(problem, inputs))
        return AttentionOutput(out.transpose(1, 2))

    return call


def _by_cache(problem: AttentionProblem, kernel: str) -> UserCall:
    flash_attn_with_kvcache = public("flashmoe_science.serving:flash_attn_with_kvcache")
    packed = problem.features.lengths == "packed"

    def call(inputs: AttentionInputs) -> AttentionOutput:
        tensors = inputs.tensors
        q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
        out: Any = flash_attn_with_kvcache(
            q[0] if packed else q,
            k,
            v,
            cache_seqlens=tensors.cache_seqlens,
            cache_batch_idx=tensors.cache_batch_idx,
            cache_leftpad=tensors.leftpad,
            page_table=tensors.page_table,
            cu_seqlens_q=tensors.cu_seqlens_q,
            max_seqlen_q=inputs.options.max_seqlen_q if packed else None,
            k_descale=tensors.k_scale,
            v_descale=tensors.v_scale,
            s_aux=tensors.sinks,
            kernel=kernel,
            **_options(problem, inputs),
        )
        return AttentionOutput((out[None] if packed else out).transpose(1, 2))

    return call


def _by_varlen(problem: AttentionProblem, kernel: str) -> UserCall:
    flash_attn_varlen_func = public("flashmoe_science.serving:flash_attn_varlen_func")

    def call(inputs: AttentionInputs) -> AttentionOutput:
        tensors = inputs.tensors
        assert tensors.cu_seqlens_q is not None
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (inputs.q, inputs.k, inputs.v))
        out: Any = flash_attn_varlen_func(
            q,
            k,
            v,
            tensors.cu_seqlens_q,
            tensors.cu_seqlens_k,
            inputs.options.max_seqlen_q,
            inputs.options.max_seqlen_k,
            k_descale=tensors.k_scale,
            v_descale=tensors.v_scale,
            num_splits=0,
            s_aux=tensors.sinks,
            kernel=kernel,
            **_options(problem, inputs),
        )
        return AttentionOutput(out[None].transpose(1, 2))

    return call
