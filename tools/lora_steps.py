"""Time LoRA steps of a stack of layers of experts on packed documents by ours and by PyTorch: tokens per second.

    python tools/lora_steps.py --out FILE [--size qwen3-30b|tiny-moe] [--layers 4] [--rank 16] [--documents 8]

The layers are those of tools/decoder.py in bf16 with random weights, which are frozen; the experts' two products have adapters,
which AdamW trains. A step is that of tools/train_steps.py, on one packed sequence: its documents' lengths are drawn, evenly by
their logarithm, and each document attends to itself. By ours: packed attention, router, and adapters in the experts' kernels.
By PyTorch: SDPA of each document, its top-k, and grouped products of experts and of adapters.

Of a step 4 operations a frozen weight and token are counted, 6 a trained one, 3 for each expert's share of tokens, and 6 a
score and head dimension of causal attention.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from decoder import SIZES, Decoder, Layer, Size
from decoder_attention import Sdpa, alone
from end_to_end import Way
from record import write_record
from train_steps import Training, measured, shown, used_of

import flashmoe_science as fms
from flashmoe_science.ops.moe.peers.routers import by_pytorch

Tensor = torch.Tensor
ADAPTERS = ("up_a", "up_b"), ("down_a", "down_b")  # of a layer


class Ours:
    name = "fms"

    def __init__(self, lengths: list[int], device: str) -> None:
        self.starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self.longest = max(lengths)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_both = self.starts, self.starts, self.longest, self.longest
        return alone(fms.flash_attn_varlen_func(q[0], k[0], v[0], *of_both, causal=True))[None]


class SdpaOfEach(Sdpa):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(False)
        self.lengths = lengths

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(one.split(self.lengths, 1) for one in (q, k, v)), strict=True)
        return torch.cat([super(SdpaOfEach, self).prefill(*one) for one in documents], 1)


def adapted(x: Tensor, logits: Tensor, layer: Layer, size: Size, kernel: str | None = None) -> Tensor:
    choice = fms.route(logits, size.top_k, normalize="sum") if kernel is None else by_pytorch(logits, size.top_k)
    of_up, of_down = ((layer[a], layer[b], 2.0) for a, b in ADAPTERS)
    return fms.fused_moe(x, layer["up"], layer["down"], *choice, adapters=(of_up, of_down), kernel=kernel)


class Tuning(Training):
    """A frozen stack of layers, adapters of its experts, their optimizer and packed documents."""

    def __init__(self, size: Size, lengths: list[int], rank: int, device: str, dtype: torch.dtype) -> None:
        self.model = Decoder(replace(size, vocabulary=1), device, dtype, max(lengths))
        frozen = sum(used_of(one, size) for layer in self.model.layers for one in layer.values())
        shapes = (rank, size.width), (2 * size.inner, rank), (rank, size.inner), (size.width, rank)
        for layer in self.model.layers:
            for name, shape in zip((*ADAPTERS[0], *ADAPTERS[1]), shapes, strict=True):
                layer[name] = torch.randn(size.experts, *shape, device=device).mul(shape[1] ** -0.5).to(dtype).requires_grad_()
        self.weights = [layer[name] for layer in self.model.layers for pair in ADAPTERS for name in pair]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, fused=device == "cuda")
        self.batch, self.length = 1, sum(lengths)
        self.tokens = self.length
        self.input = torch.randn(1, self.tokens, size.width, device=device, dtype=dtype)
        self.model.rotation = torch.cat([self.model.rotation[:length] for length in lengths])
        trained = sum(used_of(one, size) for one in self.weights)
        of_scores = 6 * size.layers * size.heads * size.head_dim * sum(length**2 for length in lengths)
        self.flops = self.tokens * (4 * frozen + 6 * trained) + of_scores


def lengths_of(documents: int, shortest: int, longest: int) -> list[int]:
    """Random lengths, the same in each run."""
    spread = torch.rand(documents, generator=torch.Generator().manual_seed(0))
    return [round(shortest * (longest / shortest) ** one) for one in spread.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=[name for name, one in SIZES.items() if one.experts and not one.weight_format])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--between", type=int, nargs=2, default=[256, 8192], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--samples", type=int, default=10)
    parser.set_defaults(size="qwen3-30b")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = replace(SIZES[arguments.size], layers=arguments.layers)
    lengths = lengths_of(arguments.documents, *arguments.between)
    by_grouped = partial(adapted, kernel="grouped_mm")
    found = [
        Way("sdpa-grouped_mm", SdpaOfEach(lengths), by_grouped),
        Way("fms", Ours(lengths, device), adapted),  # type: ignore[arg-type]  # it takes no step of decoding
    ]
    rows = measured(Tuning(size, lengths, arguments.rank, device, dtype), found, arguments.samples, device)
    print(f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, rank {arguments.rank}\n{shown(rows)}")
    kept = {"size": asdict(size), "dtype": str(dtype), "rank": arguments.rank, "lengths": lengths}
    write_record(arguments.out, {**kept, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
