"""Attention of one sequence, and a mixture of experts, on several GPUs: on torch.distributed alone."""

from flashmoe_science.parallel.context import context_attention as context_attention
from flashmoe_science.parallel.copies import ContextWorkspace as ContextWorkspace
from flashmoe_science.parallel.decode import context_decode as context_decode
from flashmoe_science.parallel.exchange import unshard as unshard
from flashmoe_science.parallel.expert import expert_parallel_moe as expert_parallel_moe
from flashmoe_science.parallel.layout import positions as positions
from flashmoe_science.parallel.layout import shard as shard
from flashmoe_science.parallel.parts import DecodeWorkspace as DecodeWorkspace
from flashmoe_science.parallel.workspace import ExpertWorkspace as ExpertWorkspace

__all__ = [
    "ContextWorkspace",
    "DecodeWorkspace",
    "ExpertWorkspace",
    "context_attention",
    "context_decode",
    "expert_parallel_moe",
    "positions",
    "shard",
    "unshard",
]
