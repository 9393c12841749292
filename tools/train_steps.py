"""Time training steps of a stack of layers of random weights by ours and by others: tokens per second.

    python tools/train_steps.py --out FILE [--size 8b|qwen3-30b|tiny|tiny-moe] [--layers 4] [--batch 1] [--length 8192 ...]

The layers are those of tools/decoder.py in bf16. Of Llama 3 8B attention differs: PyTorch's, ours as records choose, ours
with equal bits, FlashAttention-4. Of Qwen3-30B-A3B experts differ too: PyTorch's SDPA and grouped products; ours; ours after
PyTorch's top-k; FlashAttention-4 and SonicMoE with its own router. A step is a forward of random states, the mean square of
what comes out, a backward, and AdamW, whose moments have the dtype of the weights. The gradients of each way are compared with
the first's before any step is taken. Samples alternate between ways, forth and back.

Of a step 6 operations a weight and token are counted, 3 for each expert's share of tokens, and 6 a score and head dimension of
causal attention (PaLM, appendix B, halved); MFU is their rate by the GPU's dense peak.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decoder import SIZES, Decoder, Layer, Size
from decoder_attention import Sdpa, alone
from end_to_end import Way, in_one_line, in_turns, seconds, ways
from record import write_record

import flashmoe_science as fms
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.ops.moe.call import SWIGLU, Tensors
from flashmoe_science.ops.moe.peers import sonicmoe

Tensor = torch.Tensor


class Ours:
    def __init__(self, deterministic: bool) -> None:
        self.deterministic = deterministic
        self.name = "fms-deterministic" if deterministic else "fms"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return alone(fms.flash_attn_func(q, k, v, causal=True, deterministic=self.deterministic))


class FlashAttention4:
    name = "fa4"

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_func

        self.call = flash_attn_func

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return alone(self.call(q, k, v, causal=True))


def by_sonicmoe(x: Tensor, logits: Tensor, layer: Layer, size: Size) -> Tensor:
    return sonicmoe.train(Tensors(x, layer["up"], layer["down"], *sonicmoe.route(logits, size.top_k)), SWIGLU)


def trained_by(size: Size, device: str) -> tuple[list[Way], dict[str, str]]:
    """The ways that can run, the reference first; and the reasons why others cannot."""
    if size.experts:
        own = {one.name: one for one in ways(size, device)[0]}
        reference = replace(own["grouped_mm"], name="sdpa-grouped_mm", attention=Sdpa(False))
        found, other, experts = [reference, own["fms"], own["fms-experts"]], "fa4-sonicmoe", by_sonicmoe
    else:
        found = [Way("sdpa", Sdpa(False)), *(Way(one.name, one) for one in (Ours(False), Ours(True)))]  # type: ignore[arg-type]
        other, experts = "fa4", None
    try:
        if why := "it needs a GPU" if device != "cuda" else sonicmoe.absent() if experts else None:
            raise ImportError(why)
        found.append(Way(other, FlashAttention4(), experts))  # type: ignore[arg-type]  # it takes no step of decoding
    except ImportError as error:
        return found, {other: str(error)}
    return found, {}


def used_of(weight: Tensor, size: Size) -> float:
    """How many elements of a weight a token uses: of experts the share of those that it chooses."""
    return weight.numel() * (size.top_k / size.experts if weight.dim() == 3 else 1)


class Training:
    """A stack of layers, its optimizer and its input."""

    def __init__(self, size: Size, batch: int, length: int, device: str, dtype: torch.dtype) -> None:
        self.model = Decoder(replace(size, vocabulary=1), device, dtype, length)
        self.weights = [one.requires_grad_() for layer in self.model.layers for one in layer.values()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, fused=device == "cuda")
        self.input = torch.randn(batch, length, size.width, device=device, dtype=dtype)
        shared = sum(used_of(one, size) for one in self.weights)
        of_scores = 6 * size.layers * size.heads * size.head_dim * length
        self.batch, self.length, self.tokens = batch, length, batch * length
        self.flops = self.tokens * (6 * shared + of_scores)

    def gradients(self, way: Way) -> list[Tensor]:
        """Of all weights, which they are left with."""
        self.optimizer.zero_grad()
        attend = lambda _, q, k, v: way.attention.prefill(q, k, v)  # noqa: E731
        out = self.model.through(self.input, attend, way.experts, self.model.rotation[None])
        out.float().square().mean().backward()
        return [one.grad for one in self.weights if one.grad is not None]

    def step(self, way: Way) -> None:
        self.gradients(way)
        self.optimizer.step()


@dataclass
class Row:
    """Of a step of ``batch`` sequences of ``length`` tokens. ``seconds`` is the median of ``samples``, each the seconds of a
    step; ``error`` the RMS of all gradients' difference from the first way's, relative to those."""

    way: str
    batch: int
    length: int
    seconds: float | None = None
    samples: list[float] | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    failed: str | None = None


def measured(training: Training, found: list[Way], samples: int, device: str) -> list[Row]:
    rows = compared(training, found)
    timed(training, found, rows, samples, device)
    return rows


def compared(training: Training, found: list[Way]) -> list[Row]:
    """A row a way, with its gradients' error; one that fails says why."""
    rows, reference = [], None
    for way in found:
        row = Row(way.name, training.batch, training.length)
        try:
            gradients = training.gradients(way)
            reference = [one.clone() for one in gradients] if reference is None else reference
            off = sum((one.float() - right).square().sum().item() for one, right in zip(gradients, reference, strict=True))
            row.error = (off / sum(one.float().square().sum().item() for one in reference)) ** 0.5
        except Exception as error:
            row.failed = in_one_line(error)
        rows.append(row)
    return rows


def timed(training: Training, found: list[Way], rows: list[Row], samples: int, device: str) -> None:
    """Fill in what steps take, with a GPU also of memory."""
    calls: dict[str, Callable[[], object]] = {}
    for way, row in zip(found, rows, strict=True):
        if row.failed is None:
            calls[way.name] = partial(training.step, way)
            calls[way.name]()  # the first step of all allocates the optimizer's moments
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds(calls[way.name], device)
            row.peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else None
    sampled = in_turns(calls, samples, device)
    gpu = current_gpu()
    for row in rows:
        if row.way in sampled:
            row.samples = [round(one, 9) for one in sampled[row.way]]
            row.seconds = statistics.median(row.samples)
            row.tokens_per_second = training.tokens / row.seconds
            row.mfu = None if gpu is None else training.flops / row.seconds / gpu.fastest_flops("16-bit")


def shown(rows: list[Row]) -> str:
    head = f"{'ms':>9} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>8} {'error':>8}  against {rows[0].way}"
    lines = [f"{f'{rows[0].batch} x {rows[0].length} tokens':18} {head}"]
    for row in rows:
        if row.seconds is None:
            lines.append(f"{row.way:18} {row.failed}")
            continue
        mfu, peak = ("" if row.mfu is None else f"{row.mfu:.1%}"), (row.peak_bytes or 0) / 2**30
        ratio = f"{rows[0].seconds / row.seconds:.3f}x" if rows[0].seconds else ""
        tokens = f"{row.seconds * 1e3:9.2f} {row.tokens_per_second:10.0f}"
        lines.append(f"{row.way:18} {tokens} {mfu:>6} {peak:8.2f} {row.error:8.1e}  {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=[name for name, size in SIZES.items() if size.weight_format is None], default="8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, nargs="+", default=[8192])
    parser.add_argument("--samples", type=int, default=10)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = replace(SIZES[arguments.size], layers=arguments.layers)
    found, absent = trained_by(size, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kept: dict[str, Any] = {"size": asdict(size), "dtype": str(dtype), "absent": absent, "rows": []}
    for length in arguments.length:
        rows = measured(Training(size, arguments.batch, length, device, dtype), found, arguments.samples, device)
        print(shown(rows), flush=True)
        kept["rows"] += [asdict(row) for row in rows]
        write_record(arguments.out, kept)  # a later length may need more memory than there is
    for name, why in absent.items():
        print(f"{name} was not run: {why}")


if __name__ == "__main__":
    main()
