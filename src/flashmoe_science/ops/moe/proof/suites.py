"""The problems that mixtures of experts are measured on: layers of models in use, from one token to 16k; and tiny ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random

from flashmoe_science.formats import FORMATS
from flashmoe_science.ops.moe.problem import MoEProblem

# experts, experts a token, model width, expert width, and the words of the experts (config.json and code of each model).
_MODELS = {
    "qwen3-30b-a3b": "e128 k8 d2048 f768 bf16",
    "deepseek-v3": "e256 k8 d7168 f2048 bf16",
    "mixtral-8x7b": "e8 k2 d4096 f14336 bf16",
    "gpt-oss-20b": "e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed",
}
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
# As their checkpoints have them.
_FORMATS = (
    "e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved",  # gpt-oss-20b
    "e128 k8 d2048 f768 bf16 w:fp8_block",  # qwen3-30b-a3b
    "e128 k8 d2048 f768 bf16 w:fp8_block_w8a8",
    "e128 k8 d2048 f768 bf16 w:int4_g128",
)


def _layers(models: tuple[str, ...], routing: str) -> tuple[str, ...]:
    """Every number of tokens of each model's layer, as text; ``routing`` is a word of MoEProblem, empty for given ids."""
    return tuple(f"moe t{tokens} {_MODELS[one]} {routing}".rstrip() for one in models for tokens in _TOKENS)


# From router logits, but for "moe-ids". The committed records of "moe-qwen3" until November 2026 are from given ids, those of
# "moe-gpt-oss" of SwiGLU without biases in the sizes of gpt-oss.
SUITES = {
    "moe": _layers(tuple(_MODELS), "logits"),
    "moe-qwen3": _layers(("qwen3-30b-a3b",), "logits"),
    "moe-deepseek-v3": _layers(("deepseek-v3",), "logits"),
    "moe-mixtral": _layers(("mixtral-8x7b",), "logits"),
    "moe-gpt-oss": _layers(("gpt-oss-20b",), "logits"),
    "moe-skewed": _layers(("qwen3-30b-a3b",), "zipf"),
    "moe-ids": _layers(("qwen3-30b-a3b",), ""),
    "moe-formats": (
        *(f"moe t{tokens} {one} logits" for one in _FORMATS for tokens in _TOKENS[:-1]),
        "moe t256 e128 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved logits",  # gpt-oss-120b
        *(f"moe t{tokens} e256 k8 d7168 f2048 bf16 w:fp8_block_w8a8 logits" for tokens in (1, 256, 4096)),  # deepseek-v3
    ),
}

DEFAULT = (
    "moe t1 e8 k2 d512 f1024 bf16",  # one token: weights are all there is to read
    "moe t256 e8 k2 d512 f1024 bf16",
    "moe t37 e16 k3 d96 f160 fp32",  # sizes that no tile divides
    "moe t2048 e32 k4 d256 f256 bf16",
)
SMOKE = "moe t37 e16 k3 d96 f160 bf16"
BUILD = (
    "moe t1 e128 k8 d2048 f768 bf16",
    "moe t64 e128 k8 d2048 f768 bf16",
    "moe t1024 e128 k8 d2048 f768 fp16",
    "moe t4096 e128 k8 d2048 f768 bf16",
    "moe t256 e8 k2 d1000 f520 fp32",
    "moe t64 e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed",
    "moe t1 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved",
    "moe t1024 e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved",
    "moe t64 e128 k8 d2048 f768 bf16 w:fp8_block",
    "moe t64 e128 k8 d2048 f768 bf16 w:fp8_block_w8a8",
    "moe t64 e128 k8 d2048 f768 bf16 w:fp8_channel",
    "moe t1024 e128 k8 d2048 f768 fp16 w:fp8_channel",
    "moe t64 e128 k8 d2048 f768 bf16 w:fp8_channel_w8a8",
    "moe t64 e128 k8 d2048 f768 bf16 w:fp8_channel_static",
    "moe t1 e128 k8 d2048 f768 bf16 w:int4_g128",
    "moe t1024 e128 k8 d2048 f768 fp16 w:int4_g32",
    "moe t1 e128 k8 d2048 f768 bf16 w:int4_g128_zero",
    "moe t1024 e128 k8 d2048 f768 fp16 w:int4_g32_zero",
)
# What Triton's interpreter does in seconds.
SMALL = (
    "moe t1 e8 k2 d64 f48 bf16",
    "moe t2 e8 k1 d64 f48 fp32",
    "moe t37 e16 k3 d96 f160 fp16",
    "moe t7 e5 k5 d17 f9 bf16",
    "moe t64 e1 k1 d64 f64 fp32",
    "moe t33 e64 k4 d32 f16 bf16",
    "moe t5 e7 k3 d24 f16 fp32 logits",
    "moe t9 e16 k2 d16 f24 bf16 zipf",
    "moe t9 e4 k2 d32 f24 bf16 bias clamped interleaved transposed logits",
    "moe t3 e4 k2 d32 f24 fp16 gelu_tanh interleaved",
    "moe t5 e4 k2 d32 f24 fp32 bias relu2 ungated",
    "moe t9 e4 k2 d96 f64 bf16 w:mxfp4 bias clamped interleaved logits",
    "moe t5 e4 k2 d200 f72 bf16 w:fp8_block",
    "moe t5 e4 k2 d200 f72 bf16 w:fp8_block_w8a8",
    "moe t5 e4 k2 d40 f24 fp16 w:fp8_channel",
    "moe t5 e4 k2 d200 f72 bf16 w:fp8_channel_w8a8",
    "moe t5 e4 k2 d200 f72 bf16 w:fp8_channel_static",
    "moe t5 e4 k2 d64 f96 bf16 w:int4_g32",
    "moe t5 e4 k2 d64 f96 bf16 w:int4_g32_zero",
)

_SIZES = (
    "t40 e8 k2 d64 f48",
    "t1 e8 k2 d64 f48",
    "t2 e8 k1 d64 f48",
    "t37 e8 k8 d64 f48",
    "t37 e16 k3 d96 f160",
    "t64 e1 k1 d64 f64",
    "t33 e64 k4 d32 f16",
    "t129 e4 k2 d100 f36",
    "t7 e5 k5 d17 f9",
    "t256 e8 k2 d16 f128",
)
_LARGE = (
    "t20 e128 k8 d32 f24",
    "t64 e512 k8 d32 f24",
    "t20 e512 k10 d32 f24",
    "t1 e256 k8 d40 f24",
    *(f"t{tokens} e32 k4 d64 f48" for tokens in (4, 16)),
    "t300 e160 k6 d24 f16",
    "t1 e60 k4 d40 f24",
    "t37 e8 k2 d64 f64 transposed",  # square: read in the other order it has the shape
    "t9 e32 k16 d32 f24",
    "t9 e64 k64 d32 f24",  # so many that a sum in 16 bits is beyond the cap
    "t33000 e4 k2 d8 f2",  # more pairs than 16 bits number
    "t66000 e2 k1 d8 f2",  # more than a grid's second dimension has; of a sum over tokens in 16 bits too many
    "t1100 e4 k2 d16 f8",
    "t20 e4 k2 d1040 f24",
    "t20 e4 k2 d24 f1040",
)
# What the others leave out of each two: dtype, tokens, experts, experts a token, whether those are all, widths, memory order.
_PAIRS = (
    "t1 e1 k1 d128 f160 fp32 transposed",
    "t128 e256 k5 d72 f20 fp16 transposed",
    "t1 e64 k1 d100 f9 fp16 transposed",
    "t70 e256 k1 d17 f96 fp32 transposed",
    "t300 e1 k1 d17 f9 fp16 transposed",
    "t140 e32 k6 d17 f80 fp32 transposed",
    "t37 e4 k4 d33 f16 fp32 transposed",
    "t1 e64 k1 d72 f48 fp16 transposed",
)
# One token, one expert, all experts, more experts than tokens, sizes that no tile divides; each in every dtype. Then as many
# experts, pairs, tokens and columns as large models have, and weights in the other memory order. From given ids,
# as a function takes them.
SWEEP = (
    *(f"moe {sizes} {dtype}" for sizes in _SIZES for dtype in ("bf16", "fp16", "fp32")),
    *(f"moe {sizes} bf16" for sizes in _LARGE),
    *(f"moe {one}" for one in _PAIRS),
)

# Of what a function has arguments for beside those that it must have, by their names.
_ALONE = {
    "gate_up_bias": ("moe t9 e4 k2 d32 f24 bf16 bias", "moe t1 e8 k3 d64 f48 fp16 bias", "moe t37 e8 k2 d64 f48 fp32 bias"),
    "interleaved": ("moe t9 e4 k2 d32 f24 fp16 interleaved", "moe t1 e8 k2 d64 f48 bf16 interleaved"),
    "activation": (
        "moe t9 e4 k2 d32 f24 bf16 clamped",
        "moe t1 e8 k2 d64 f48 fp32 gelu",  # sizes that the sweep has with silu
        "moe t9 e4 k2 d32 f24 fp16 gelu_tanh",
    ),
    "gate_up_scale": (
        "moe t9 e4 k2 d96 f64 bf16 w:mxfp4",
        "moe t1 e4 k2 d96 f64 bf16 w:mxfp4",
        "moe t5 e4 k2 d64 f96 bf16 w:int4_g32",
        "moe t5 e4 k2 d256 f128 bf16 w:int4_g128",
        "moe t1 e4 k2 d256 f128 fp16 w:int4_g128",
        "moe t5 e4 k2 d40 f24 bf16 w:fp8_channel",
        "moe t1 e4 k2 d40 f24 fp16 w:fp8_channel",
        "moe t5 e4 k2 d200 f72 bf16 w:fp8_block",
        "moe t1 e4 k2 d200 f72 bf16 w:fp8_block",
        "moe t5 e2 k1 d2048 f128 bf16 w:fp8_block",  # deep enough to show sums of few bits
        "moe t5 e2 k1 d2048 f128 bf16 w:fp8_block_w8a8",
        "moe t5 e2 k1 d2048 f128 bf16 w:fp8_channel_w8a8",
    ),
    "gate_up_zero_point": (
        "moe t5 e4 k2 d64 f96 bf16 w:int4_g32_zero",
        "moe t1 e4 k2 d256 f128 fp16 w:int4_g128_zero",
        "moe t5 e4 k2 d256 f128 bf16 w:int4_g128_zero",
    ),
    "gate_up_input_scale": (
        "moe t5 e4 k2 d40 f24 fp16 w:fp8_channel_static",
        "moe t5 e2 k1 d2048 f128 bf16 w:fp8_channel_static",
    ),
}
# gpt-oss, of functions that have all of these arguments.
_GPT_OSS = ("gate_up_scale", "gate_up_bias", "interleaved", "activation")
_OF_GPT_OSS = tuple(f"moe {sizes} e4 k2 d96 f64 bf16 w:mxfp4 bias clamped interleaved" for sizes in ("t1", "t9"))
# By arguments, the words that each is asked with where it meets more: many tokens and experts; each other argument.
_WORDS = {
    "gate_up_scale": ("w:mxfp4", "w:int4_g32", "w:fp8_channel", "w:fp8_block"),
    "gate_up_zero_point": ("w:int4_g32_zero",),
    "gate_up_input_scale": ("w:fp8_channel_static",),
    "gate_up_bias": ("bias",),
    "activation": ("clamped",),
    "interleaved": ("interleaved",),
}
_OF_FORMATS = {"gate_up_scale", "gate_up_zero_point", "gate_up_input_scale"}  # a problem has one format


def sweep_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The problems of what a function has these arguments for, alone and each two together; those of gpt-oss last."""
    given = [name for name in _WORDS if name in arguments]
    pairs = (pair for pair in combinations(given, 2) if not set(pair) <= _OF_FORMATS)
    return (
        *(text for name in given for text in _ALONE[name]),
        *(f"moe t140 e40 k4 d64 f96 bf16 {word}" for name in given for word in _WORDS[name]),
        *(f"moe t9 e4 k2 d64 f96 bf16 {a} {b}" for x, y in pairs for a, b in product(_WORDS[x], _WORDS[y])),
        *(_OF_GPT_OSS if set(_GPT_OSS) <= set(arguments) else ()),
    )


def drawn(near: MoEProblem, chance: Random) -> MoEProblem:
    """A problem of about the size of ``near``: other tokens, experts, widths and experts a token; no more weights, as those of
    the largest leave no room for more."""

    def about(n: int, least: int = 1, step: int = 1) -> int:
        return max(least, round(n * math.exp2(chance.uniform(-0.5, 0.5)) / step) * step)

    of_format = FORMATS.get(near.weight_format or "")
    step = max(64, (of_format and of_format.group) or 0)  # a row has whole groups that share a scale
    experts, dim, hidden = about(near.experts, 2), about(near.dim, step, step), about(near.hidden, step, step)
    experts = max(2, min(experts, near.experts * near.dim * near.hidden // (dim * hidden)))
    tokens, top_k = about(near.tokens), min(experts, about(near.top_k))
    return replace(near, tokens=tokens, experts=experts, top_k=top_k, dim=dim, hidden=hidden)
