"""The backend "FMS" of vLLM 0.33: vLLM's own Triton backend, with our ``flash_attn_varlen_func`` in the place of its kernel.

The layout of keys and values, their writes to the cache and the metadata of a batch stay vLLM's. The backend declares only what
our function serves, so that vLLM refuses other models: no other kernel serves. It asks for no full CUDA graphs, as vLLM's
lengths at capture have not been tried; vLLM then captures the parts between attention layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from flashmoe_science.integrations.vllm import NAME
from flashmoe_science.ops.attention.problem import MAX_HEAD_DIM
from flashmoe_science.serving import flash_attn_varlen_func


class FMSBuilder(TritonAttentionMetadataBuilder):
    """The metadata of a batch, as vLLM's Triton backend builds it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class FMSImpl(TritonAttentionImpl):
    """One attention layer.

    Raises:
        NotImplementedError: a layer with chunks or with the square root of ALiBi.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.use_alibi_sqrt or self.chunk_lookback != -1:
            raise NotImplementedError(f"the attention backend {NAME!r} serves neither chunk_lookback nor use_alibi_sqrt")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the batch's tokens, query [tokens, heads, head_size], to the pages of their sequences, into ``output``.

        Args:
            kv_cache: [blocks, heads_kv, block_size, 2 * head_size], a key and then its value; the new ones are in it.
            attn_metadata: of the batch; None where vLLM measures memory, and the output is zeros.

        Raises:
            NotImplementedError: a quantised output, or a mask that is not causal.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"the attention backend {NAME!r} does not quantise its output")
        batch = attn_metadata
        if batch.causal is not True or batch.mm_prefix_range is not None or batch.rswa_prefix_lens is not None:
            raise NotImplementedError(f"the attention backend {NAME!r} serves causal attention without prefixes")
        tokens = batch.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        out = flash_attn_varlen_func(
            query[:tokens], keys, values, batch.query_start_loc, None, batch.max_query_len, batch.max_seq_len,
            seqused_k=batch.seq_lens, softmax_scale=self.scale, causal=True, window_size=self.sliding_window,
            softcap=float(self.logits_soft_cap), num_splits=0, block_table=batch.block_table, alibi_slopes=self.alibi_slopes,
            s_aux=self.sinks,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        output[:tokens].copy_(out)
        return output


class FMSBackend(TritonAttentionBackend):
    """The backend, with the features by which vLLM chooses one for a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FMSImpl]:
        return FMSImpl

    @staticmethod
    def get_builder_cls() -> type[FMSBuilder]:
        return FMSBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def _unsupported(cls) -> bool:
        return False

    supports_non_causal = supports_mm_prefix = supports_rswa = supports_alibi_sqrt = supports_batch_invariance = _unsupported
