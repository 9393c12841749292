"""Attention of one sequence on several GPUs, on torch.distributed alone."""

from flashmoe_science.parallel.context import context_attention as context_attention
from flashmoe_science.parallel.exchange import unshard as unshard
from flashmoe_science.parallel.layout import positions as positions
from flashmoe_science.parallel.layout import shard as shard

__all__ = ["context_attention", "positions", "shard", "unshard"]
