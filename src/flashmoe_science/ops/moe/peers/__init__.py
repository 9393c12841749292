"""Baselines: the libraries that a user would pick instead, wrapped as Kernels."""

from __future__ import annotations

from functools import partial

from flashmoe_science.ops.moe.call import MoEKernel
from flashmoe_science.ops.peer import one_config

peer_kernel = partial(MoEKernel, origin="peer", op="moe", configs=one_config)
