"""Named lists of attention problems as serving has them: decoding, chunks of a prompt against a long cache, and every mode.

Keys and values of one problem take 2.2 GB at the most, so that two sets of them and an fp64 copy fit a GPU of 80 GB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from flashmoe_science.ops.attention.problem import AttentionProblem

# Of models: Llama-3-8B and Mistral (32 heads on 8), Llama-2-7B (32), Llama-3-70B (64 on 8), one key head for all (16 on 1).
_GQA4, _MHA, _GQA8, _MQA = "h32 hk8", "h32", "h64 hk8", "h16 hk1"

# One to eight queries against 1k to 128k keys, batches of 1 to 128.
_DECODE = (
    # One length for all, as one request has, or a batch that a framework pads.
    *(f"b1 {_GQA4} q1 k{keys} d128" for keys in (1024, 4096, 8192, 16384, 32768, 131072)),
    f"b1 {_MHA} q1 k4096 d128",
    f"b1 {_GQA8} q1 k16384 d128",
    f"b1 {_MQA} q1 k16384 d128",
    f"b1 {_GQA4} q8 k8192 d128 causal",
    f"b8 {_GQA4} q4 k16384 d128 causal",
    f"b4 {_GQA4} q1 k131072 d128",
    f"b16 {_GQA4} q1 k8192 d128",
    f"b64 {_GQA4} q1 k8192 d128",
    f"b128 {_GQA8} q1 k4096 d128",
    f"b64 {_MQA} q1 k8192 d128",
    f"b32 {_GQA4} q1 k2048 d64",
    # A cache with a length for each sequence.
    f"b1 {_GQA4} q1 k4096 d128 bshd ragged",
    f"b8 {_GQA4} q1 k32768 d128 bshd ragged",
    f"b32 {_GQA4} q1 k8192 d128 bshd ragged",
    f"b128 {_GQA4} q1 k2048 d128 bshd ragged",
    f"b16 {_MHA} q1 k4096 d128 bshd ragged",
    f"b16 {_GQA8} q4 k8192 d128 causal bshd ragged",
    f"b64 {_MQA} q1 k8192 d128 bshd ragged",
    f"b32 {_GQA4} q1 k4096 d64 bshd ragged",
)
# The same from pages of 16 and 64 keys.
_DECODE_PAGED = (
    f"b1 {_GQA4} q1 k8192 d128 bshd ragged page16",
    f"b1 {_GQA4} q1 k65536 d128 bshd ragged page64",
    f"b8 {_GQA4} q1 k32768 d128 bshd ragged page16",
    f"b32 {_GQA4} q1 k8192 d128 bshd ragged page16",
    f"b32 {_GQA4} q1 k8192 d128 bshd ragged page64",
    f"b128 {_GQA8} q1 k4096 d128 bshd ragged page16",
    f"b16 {_MHA} q2 k4096 d128 causal bshd ragged page64",
    f"b64 {_MQA} q1 k8192 d128 bshd ragged page64",
    f"b16 {_GQA8} q8 k16384 d128 causal bshd ragged page16",
    f"b32 {_GQA8} q1 k4096 d64 bshd ragged page16",
)

# 16 to 512 queries against 8k to 128k keys.
_CHUNKED = (
    *(f"b1 {_GQA4} q16 k{keys} d128 causal" for keys in (8192, 131072)),
    f"b1 {_GQA4} q64 k32768 d128",
    f"b1 {_GQA4} q64 k32768 d128 causal",
    *(f"b1 {_GQA4} q128 k{keys} d128 causal" for keys in (8192, 65536)),
    f"b1 {_GQA4} q256 k32768 d128 causal",
    *(f"b1 {_GQA4} q512 k{keys} d128 causal" for keys in (8192, 32768, 131072)),
    f"b8 {_GQA4} q32 k8192 d128 causal",
    f"b4 {_GQA4} q128 k16384 d128 causal",
    f"b1 {_MHA} q64 k16384 d128 causal",
    f"b1 {_GQA8} q64 k16384 d64 causal",
    # Chunks and single tokens in one batch.
    f"b16 {_GQA4} q512 k16384 d128 causal bshd packed page16",
    f"b16 {_GQA4} q512 k16384 d128 causal bshd packed",
)

# Windows, caps, sinks, biases, packed sequences and 8-bit caches, of models that have them.
_SERVING = (
    # Mistral: a window of 4096.
    f"b1 {_GQA4} q8192 d128 causal bshd left4095",
    f"b16 {_GQA4} q1 k16384 d128 causal bshd left4095 ragged page16",
    # Gemma-2-9B: a cap of 50, and every other layer a window; 27B has heads of 128.
    "b1 h16 hk8 q4096 d256 causal bshd softcap50",
    "b1 h16 hk8 q8192 d256 causal bshd left4095 softcap50",
    "b2 h32 hk16 q4096 d128 causal bshd softcap50",
    "b8 h16 hk8 q1 k8192 d256 bshd softcap50 ragged",
    "b8 h16 hk8 q1 k8192 d256 causal bshd left4095 softcap50 ragged page16",
    # gpt-oss: sinks, and every other layer a window of 128.
    f"b1 {_GQA8} q4096 d64 causal bshd sinks",
    f"b1 {_GQA8} q4096 d64 causal bshd left127 sinks",
    f"b32 {_GQA8} q1 k8192 d64 bshd sinks ragged page16",
    f"b32 {_GQA8} q1 k8192 d64 causal bshd left127 sinks ragged page16",
    # BLOOM and MPT: ALiBi. T5, and structures of proteins: an additive bias. Vision and padding: a boolean mask.
    "b2 h32 q2048 d128 causal bshd alibi",
    "b16 h32 q1 k4096 d128 bshd alibi ragged",
    "b8 h12 q512 d64 bias",
    "b2 h16 q2048 d64 bias",
    "b4 h16 q1024 d64 boolmask",
    f"b2 {_GQA4} q512 k4096 d128 boolmask",
    # PaliGemma: every query sees the image's tokens.
    "b4 h8 hk1 q1024 d256 causal bshd prefix256",
    # Sequences of a mix of lengths one after another: prompts, an encoder, ModernBERT's local layers.
    f"b16 {_GQA4} q4096 d128 causal bshd packed",
    f"b64 {_GQA4} q1024 d128 causal bshd packed",
    "b32 h16 q1024 d64 bshd packed",
    "b32 h12 q2048 d64 bshd left64 right64 packed",
    # A batch that is padded on its left; e4m3 caches.
    f"b16 {_GQA4} q1 k4096 d128 causal bshd ragged leftpad",
    f"b1 {_GQA4} q1 k32768 d128 bshd ragged fp8kv",
    f"b32 {_GQA4} q1 k8192 d128 bshd ragged page64 fp8kv",
)

# Each mode alone and some together, small enough for Triton's interpreter.
SMALL = (
    "b2 h4 hk2 q3 k70 d16 bf16 left9 right4",
    "b1 h2 q40 k70 d40 dv24 fp16 causal left20",
    "b1 h2 q33 k70 d16 fp32 causal softcap2",
    "b2 h2 q20 d16 bf16 causal sinks",
    "b2 h2 q40 k9 d16 fp16 causal left5 sinks",
    "b1 h4 hk2 q6 k50 d16 fp16 alibi",
    "b2 h2 q6 k40 d16 bf16 boolmask",
    "b1 h2 q20 k40 d16 fp16 causal bias",
    "b2 h2 q40 d16 bf16 causal prefix9",
    "b3 h4 hk1 q1 k90 d16 bf16 ragged",
    "b3 h4 hk2 q3 k90 d16 fp32 causal bshd ragged leftpad",
    "b3 h4 hk2 q2 k90 d16 bf16 causal bshd ragged page16",
    "b3 h4 hk2 q1 k90 d32 fp16 ragged page8 left30 sinks",
    "b4 h2 q40 d16 bf16 causal bshd packed",
    "b4 h4 hk2 q20 k60 d16 fp16 causal bshd packed page16 softcap3",
    "b3 h4 hk2 q1 k90 d16 bf16 ragged page16 fp8kv",
    "b2 h4 hk2 q2 k40 d16 fp16 causal fp8kv",
)


def small() -> Iterator[str]:
    return (f"attn {one}" for one in SMALL)


# The texts of problems as they print, in bf16.
SUITES = {
    name: [re.sub(r" d\d+", r"\g<0> bf16", f"attn {text}") for text in texts]
    for name, texts in (("decode", _DECODE), ("decode-paged", _DECODE_PAGED), ("chunked", _CHUNKED), ("serving", _SERVING))
}

_REACH = 0.75  # log2 of the factor by which a size may differ from the suite's
_MOST_HEADS = 128
_PAGES = (8, 16, 32, 64, 128, 256)


def drawn(near: AttentionProblem, chance: Random) -> AttentionProblem:
    """A problem around one of these: other lengths, another head dimension, group of heads and page, about as many bytes of
    keys; its mask and its features, but for the sizes of windows, stay."""

    def around(size: int) -> int:
        return max(1, round(size * math.pow(2.0, chance.uniform(-_REACH, _REACH))))

    keys = around(near.seqlen_k)
    head_dim = chance.choice((near.head_dim, near.head_dim, 64, 96, 128, 256))
    heads_kv = max(1, round(near.heads_kv * near.head_dim / head_dim))
    groups = [group for group in (near.heads // near.heads_kv, 4, 8) if heads_kv * group <= _MOST_HEADS]
    features = near.features
    if features.window_left is not None:
        features = replace(features, window_left=around(features.window_left))
    if features.window_right is not None:
        features = replace(features, window_right=around(features.window_right))
    if features.prefix:
        features = replace(features, prefix=around(features.prefix))
    if features.page:
        features = replace(features, page=chance.choice(_PAGES))
        keys = -(-keys // features.page) * features.page
    queries = keys if near.seqlen_q == near.seqlen_k else min(keys, around(near.seqlen_q)) if near.seqlen_q > 1 else 1
    return replace(
        near,
        batch=max(1, near.batch * near.seqlen_k // keys),
        heads=heads_kv * chance.choice((1, *groups)),
        heads_kv=heads_kv,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=head_dim,
        head_dim_v=head_dim,
        features=features,
    )
