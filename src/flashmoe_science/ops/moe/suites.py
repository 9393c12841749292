"""The problems that mixtures of experts are measured on: layers of models in use, from one token to 16k."""

from __future__ import annotations

import math
from random import Random

from flashmoe_science.ops.moe.problem import MoEProblem

# experts, experts a token, model width and expert width (config.json of each model).
_MODELS = {
    "qwen3-30b-a3b": "e128 k8 d2048 f768",
    "deepseek-v3": "e256 k8 d7168 f2048",
    "mixtral-8x7b": "e8 k2 d4096 f14336",
    "gpt-oss-20b": "e32 k4 d2880 f2880",
}
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

SUITES = {
    "moe": tuple(f"moe t{tokens} {sizes} bf16" for sizes in _MODELS.values() for tokens in _TOKENS),
    "moe-qwen3": tuple(f"moe t{tokens} {_MODELS['qwen3-30b-a3b']} bf16" for tokens in _TOKENS),
}

SMOKE = "moe t37 e16 k3 d96 f160 bf16"
BUILD = (
    "moe t1 e128 k8 d2048 f768 bf16",
    "moe t64 e128 k8 d2048 f768 bf16",
    "moe t1024 e128 k8 d2048 f768 fp16",
    "moe t4096 e128 k8 d2048 f768 bf16",
    "moe t256 e8 k2 d1000 f520 fp32",
)
# What Triton's interpreter does in seconds.
SMALL = (
    "moe t1 e8 k2 d64 f48 bf16",
    "moe t2 e8 k1 d64 f48 fp32",
    "moe t37 e16 k3 d96 f160 fp16",
    "moe t7 e5 k5 d17 f9 bf16",
    "moe t64 e1 k1 d64 f64 fp32",
    "moe t33 e64 k4 d32 f16 bf16",
)


def drawn(near: MoEProblem, chance: Random) -> MoEProblem:
    """A problem of about the size of ``near``: other tokens, experts, widths and experts a token."""

    def about(n: int, least: int = 1, step: int = 1) -> int:
        return max(least, round(n * math.exp2(chance.uniform(-0.5, 0.5)) / step) * step)

    experts = about(near.experts, 2)
    return MoEProblem(
        tokens=about(near.tokens),
        experts=experts,
        top_k=min(experts, about(near.top_k)),
        dim=about(near.dim, 64, 64),
        hidden=about(near.hidden, 64, 64),
        dtype=near.dtype,
    )
