"""Time transformers' ``generate`` on models of random weights, with this package and without: tokens per second.

    python tools/generate_tokens.py --out FILE [--models llama qwen3-moe] [--size small|tiny] [--batches 1 8] [--new 128]

The models have the shape of Llama 3.2 1B (16 layers of 2048, 32 heads over 8 of keys, head dimension 64), and eight layers of
Qwen3-30B-A3B's (8 of 128 experts). A prompt is read and new tokens are generated greedily behind it, eagerly, in the cache that
``generate`` makes by default: it grows by a token a step. The ways are transformers' defaults (``sdpa``, ``grouped_mm``) and
"fms" for attention, and for experts. Samples alternate between the ways. The logits behind the prompt are compared with the
first way's; tokens are not: of random weights the two best logits of a step are often one rounding apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from record import write_record
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from flashmoe_science.integrations.transformers import register

MODELS: dict[str, Any] = {"llama": LlamaConfig, "qwen3-moe": Qwen3MoeConfig}
SHAPES: dict[tuple[str, str], dict[str, int]] = {
    ("llama", "small"): {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    ("qwen3-moe", "small"): {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
    ("llama", "tiny"): {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 97,
    },
    ("qwen3-moe", "tiny"): {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 97,
    },
}  # fmt: skip
WAYS: dict[str, dict[str, tuple[str, str]]] = {  # attention's and experts' implementation, by name
    "llama": {"sdpa": ("sdpa", ""), "fms": ("fms", "")},
    "qwen3-moe": {
        "sdpa, grouped_mm": ("sdpa", "grouped_mm"), "fms attention": ("fms", "grouped_mm"), "fms": ("fms", "fms"),
    },
}  # fmt: skip


@dataclass
class Row:
    """``seconds`` is the median of ``samples``, a ``generate`` each; ``first`` is the first's, which compiles; ``error`` the
    RMS of the logits' difference from the first way's, relative to those."""

    model: str
    batch: int
    way: str
    first: float
    samples: list[float]
    seconds: float
    tokens_per_second: float
    error: float


def model_of(name: str, size: str, positions: int, device: str, dtype: torch.dtype) -> Any:
    """A model of random weights."""
    torch.manual_seed(0)
    config = MODELS[name](**SHAPES[name, size], max_position_embeddings=positions, eos_token_id=None, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def serve_by(model: Any, way: tuple[str, str]) -> None:
    """Set the implementations of attention and experts."""
    attention, experts = way
    model.set_attn_implementation(attention)
    if experts:
        model.set_experts_implementation(experts)


@torch.no_grad()
def logits_of(model: Any, way: tuple[str, str], prompt: torch.Tensor) -> torch.Tensor:
    """Logits of the token behind the prompt."""
    serve_by(model, way)
    logits: torch.Tensor = model(prompt, logits_to_keep=1).logits
    return logits.double()


def seconds(model: Any, way: tuple[str, str], prompt: torch.Tensor, new: int) -> float:
    """Seconds of one ``generate``."""
    serve_by(model, way)
    start = time.perf_counter()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    tokens.cpu()  # waits for the GPU
    return time.perf_counter() - start


def timed(name: str, model: Any, batch: int, prompt: int, new: int, samples: int, device: str) -> list[Row]:
    """A row a way."""
    given = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
    ways = WAYS[name]
    firsts = {way: seconds(model, ways[way], given, new) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(samples):
        for way in [*ways] if turn % 2 else [*reversed(ways)]:
            times[way].append(seconds(model, ways[way], given, new))
    right = logits_of(model, next(iter(ways.values())), given)
    rows = []
    for way, first in firsts.items():
        difference = logits_of(model, ways[way], given) - right
        error = (difference.square().mean() / right.square().mean()).sqrt().item()
        median = statistics.median(times[way])
        rows.append(Row(name, batch, way, first, times[way], median, batch * new / median, error))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--size", choices=("small", "tiny"), default="small")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    register()
    rows: list[Row] = []
    for name in options.models:
        model = model_of(name, options.size, options.prompt + options.new, device, dtype)
        for batch in options.batches:
            made = timed(name, model, batch, options.prompt, options.new, options.samples, device)
            for row in made:
                speedup = made[0].seconds / row.seconds
                print(
                    f"{name:10s} batch {batch:2d}  {row.way:17s} {row.tokens_per_second:8.1f} tokens/s  {speedup:.2f}x  "
                    f"first {row.first:5.1f} s  error {row.error:.1e}", flush=True,
                )  # fmt: skip
            rows += made
            given = {"size": options.size, "prompt": options.prompt, "new": options.new, "dtype": str(dtype)}
            write_record(options.out, given | {"rows": [asdict(one) for one in rows]})


if __name__ == "__main__":
    main()
