"""Train a small mixture of experts by ours and by PyTorch's operators on the same tokens: the loss of every step, as a record.

    python tools/loss_curve.py --out FILE [--steps 200] [--batch 8] [--length 1024]

The model is tools/decoder.py's, shaped like a Qwen3-MoE of 4 layers in bf16; on the CPU it is a tiny one in fp32. Tokens are
drawn from a Markov chain of which each token has four successors: the least loss is the chain's entropy, 1.21. "pytorch" is
SDPA and grouped products after PyTorch's top-k; "pytorch-fp32" the same in fp32, which says how far rounding alone moves a
curve; "fms" ours as records choose; "fms-deterministic" ours under PyTorch's switch for deterministic algorithms, twice, which
have to be equal.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from decoder import SIZES, Decoder, Size
from decoder_attention import Ours, Sdpa
from end_to_end import Way, in_one_line, ways
from record import write_record

Tensor = torch.Tensor
SMALL = Size(layers=4, width=512, heads=8, heads_kv=2, head_dim=128, inner=256, vocabulary=512, experts=32, top_k=4)
CHANCES = 0.5, 0.25, 0.125, 0.125  # of a token's successors
RATE = 1e-3  # of AdamW


@dataclass
class Row:
    """The loss of each step, in nats a token."""

    way: str
    dtype: str
    deterministic: bool
    losses: list[float] | None = None
    failed: str | None = None


class Chain:
    """Batches of the chain, the same for every way."""

    def __init__(self, vocabulary: int, batch: int, length: int) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._next = torch.stack([torch.randperm(vocabulary, generator=self._generator) for _ in CHANCES], 1)
        self._chances, self._shape = torch.tensor(CHANCES), (batch, length + 1)

    def batch(self) -> Tensor:
        """int64 [batch, length + 1]."""
        count, length = self._shape
        chosen = torch.multinomial(self._chances, count * length, True, generator=self._generator).view(count, length)
        tokens = [torch.randint(len(self._next), (count,), generator=self._generator)]
        for place in range(1, length):
            tokens.append(self._next[tokens[-1], chosen[:, place]])
        return torch.stack(tokens, 1)


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(way: Way, size: Size, dtype: torch.dtype, device: str, batches: list[Tensor]) -> list[float]:
    """The losses of as many steps as there are batches."""
    model = Decoder(size, device, dtype, batches[0].shape[1])
    model.embedding.mul_(size.width**-0.5)  # at 1 a step of AdamW's would be below bf16's rounding
    weights = [model.embedding, model.head, *(one for layer in model.layers for one in layer.values())]
    optimizer = torch.optim.AdamW([one.requires_grad_() for one in weights], lr=RATE, fused=device == "cuda")
    attend = lambda _, q, k, v: way.attention.prefill(q, k, v)  # noqa: E731
    losses = []
    for batch in batches:
        tokens = batch.to(device)
        states = F.embedding(tokens[:, :-1], model.embedding)
        states = model.through(states, attend, way.experts, model.rotation[None, : states.shape[1]])
        logits = F.linear(F.rms_norm(states, (size.width,)), model.head)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def curves(size: Size, device: str, batches: list[Tensor]) -> list[Row]:
    """A row a way, PyTorch's first; one that fails says why."""
    by_name = {one.name: one for one in ways(size, device)[0]}
    pytorch, ours = replace(by_name["grouped_mm"], attention=Sdpa(False)), replace(by_name["fms"], attention=Ours())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for name, way, of_way, same_bits in (
        ("pytorch", pytorch, dtype, False), ("pytorch-fp32", pytorch, torch.float32, False), ("fms", ours, dtype, False),
        ("fms-deterministic", ours, dtype, True), ("fms-deterministic", ours, dtype, True),
    ):  # fmt: skip
        row = Row(name, str(of_way), same_bits)
        try:
            with deterministic(same_bits):
                row.losses = trained(way, size, of_way, device, batches)
        except Exception as error:
            row.failed = in_one_line(error)
        rows.append(row)
    return rows


def shown(rows: list[Row]) -> str:
    """Losses by step, and the most that each is from the first's."""
    steps = len(next((row.losses for row in rows if row.losses), []))
    places = sorted({0, *(steps * part // 4 - 1 for part in (1, 2, 3, 4) if steps * part >= 4)})
    lines = [f"{'step':18}" + "".join(f"{place + 1:9}" for place in places) + "   most from the first's"]
    for row in rows:
        if row.losses is None:
            lines.append(f"{row.way:18} {row.failed}")
            continue
        off = max(map(abs, map(float.__sub__, row.losses, rows[0].losses or row.losses)))
        lines.append(f"{row.way:18}" + "".join(f"{row.losses[place]:9.4f}" for place in places) + f"   {off:.4f}")
    twice = [row.losses for row in rows if row.deterministic and row.losses]
    entropy = -sum(one * math.log(one) for one in CHANCES)
    return "\n".join([*lines, f"entropy {entropy:.4f}; equal bits twice: {len(twice) == 2 and twice[0] == twice[1]}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of PyTorch's own products, for equal bits
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SMALL if device == "cuda" else SIZES["tiny-moe"]
    chain = Chain(size.vocabulary, arguments.batch, arguments.length)
    rows = curves(size, device, [chain.batch() for _ in range(arguments.steps)])
    print(shown(rows))
    kept = {"steps": arguments.steps, "batch": arguments.batch, "length": arguments.length, "rate": RATE}
    write_record(arguments.out, {"size": asdict(size), **kept, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
