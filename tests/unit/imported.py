"""What ranks of tests import: see forked.py."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed.fsdp  # noqa: F401

from flashmoe_science.operations import OPERATIONS

with suppress(ImportError):
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

for _one in OPERATIONS:
    _one.kernels()
