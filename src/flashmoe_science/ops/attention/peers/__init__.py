"""What a user would pick instead, wrapped as Kernels. Importing this imports no peer: each is imported when it first runs."""

from __future__ import annotations

from functools import partial

from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.peer import one_config

peer_kernel = partial(AttentionKernel, origin="peer", op="attention", configs=one_config)
