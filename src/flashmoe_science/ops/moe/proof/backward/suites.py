"""Named lists of problems of the experts' backward: layers that models are trained with, a step from router logits."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_science.ops.moe.problem.backward import parse
from flashmoe_science.ops.moe.proof import suites as forward

# experts, experts a token, model width, expert width, and the words of the experts (config.json and code of each model).
_MODELS = (
    "e128 k8 d2048 f768 bf16",  # Qwen3-30B-A3B
    "e32 k4 d2880 f2880 bf16 bias clamped interleaved transposed",  # gpt-oss-20b
    "e64 k8 d2048 f1024 bf16",  # OLMoE
    "e8 k2 d4096 f14336 bf16",  # Mixtral-8x7B
)
_TINY = 20_000_000  # operations
_TOKENS = (256, 1024, 4096, 16384, 32768)


def _backward(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.replace("moe ", "moebwd ", 1) for text in texts)


def _layers(tokens: tuple[int, ...], *routings: str) -> tuple[str, ...]:
    return tuple(f"moebwd t{count} {one} {routing}".rstrip() for routing in routings for one in _MODELS for count in tokens)


SUITES = {
    "moe-train": _layers(_TOKENS, "logits", "zipf"),
    "moe-backward": _layers(_TOKENS, ""),
    "quick-moe-train": _layers((4096,), "logits", ""),
    "cpu-moe-train": ("moebwd t256 e8 k2 d128 f256 fp32 logits", "moebwd t256 e8 k2 d128 f256 bf16"),
}
DEFAULT = _backward(forward.DEFAULT[1:])
SMOKE = "moebwd t37 e16 k3 d96 f160 bf16"
BUILD = _backward(forward.BUILD[1:])
SMALL = _backward(forward.SMALL)
SWEEP = tuple(text for text in _backward(forward.SWEEP) if parse(text).flops() < _TINY)
drawn = forward.drawn


def sweep_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The forward's problems of what a function has these arguments for; weights in a format have no gradients."""
    return _backward(tuple(text for text in forward.sweep_of(arguments) if " w:" not in text))
