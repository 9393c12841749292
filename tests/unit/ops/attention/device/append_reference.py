"""Appends drawn at random, and the same in plain PyTorch, sequence by sequence.

Run as a script with TRITON_INTERPRET=1 it puts appends to append_triton in Triton's interpreter and prints one JSON object: the
complaints about each, by its seed.
"""

from __future__ import annotations

import json
import random
import sys
from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.device.append_triton import append

GARBAGE = 2**30 - 7
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 2e-6}  # the interpreter truncates to bf16


class Rotary(NamedTuple):
    """Tables [positions, half of the rotated width], and how pairs lie."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


def rotated(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """[heads, rows, width] in fp64, each row by its position."""
    if rotary is None:
        return x.double()
    c, s = rotary.cos.double()[positions], rotary.sin.double()[positions]
    half = c.shape[1]
    x = x.double().clone()
    if rotary.interleaved:
        a, b = x[..., 0 : 2 * half : 2].clone(), x[..., 1 : 2 * half : 2].clone()
        x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
    else:
        a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half], x[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return x


class Draw:
    """One append drawn from a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        rng = self.rng = random.Random(seed)
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)
        self.dtype = rng.choice(DTYPES)
        self.batch, heads_kv, heads = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 5)
        width, width_v = rng.choice([16, 20, 32, 64]), rng.choice([8, 16, 40])
        self.page, self.capacity = rng.choice([0, 0, 1, 5, 16]), rng.randint(1, 60)
        most = rng.choice([1, 1, 4, 9])
        self.news = [most] * self.batch
        packed = rng.random() < 0.4
        if packed:
            self.news = [rng.randint(0, most) for _ in range(self.batch)]
        # Some reach past the capacity: what does is left out.
        self.before = [rng.randint(0, self.capacity) for _ in range(self.batch)]
        self.k = [self.randn(heads_kv, count, width) for count in self.news]
        self.v = [self.randn(heads_kv, count, width_v) for count in self.news]
        self.rotary = self._rotary(width) if rng.random() < 0.7 else None
        self._caches(heads_kv, width, width_v)
        rows, moving = rng.choice([1, most]), self.rotary is not None and rng.random() < 0.5
        self.q, self.moving = [self.randn(heads, rows, width) for _ in range(self.batch)], moving
        starts = self.int32([sum(self.news[:place]) for place in range(self.batch + 1)]) if packed else None
        starts_q = self.int32([rows * place for place in range(self.batch + 1)]) if packed else None
        q = torch.cat([one.transpose(0, 1) for one in self.q]).transpose(0, 1)[None] if packed else torch.stack(self.q)
        k, v = (torch.cat(one, 1)[None] if packed else torch.stack(one) for one in (self.k, self.v))
        cos, sin, interleaved = self.rotary or (None, None, True)
        turns = None if self.rotary is None or self.turns is None else self.int32(self.turns)
        self.append = Append(
            self.k_cache, self.v_cache, k, v, q, self.int32(self.before), self.table, self.places, starts, starts_q, cos, sin,
            turns, interleaved, not moving, rows if packed else 0,
        )  # fmt: skip

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _rotary(self, width: int) -> Rotary:
        half = self.rng.choice([8, width // 2])
        self.turns = None
        if self.rng.random() < 0.3:
            self.turns = [self.rng.randint(0, 90) for _ in range(self.batch)]
        angles = self.randn(120, half).double() * 3
        cos, sin = torch.cos(angles).to(self.dtype), torch.sin(angles).to(self.dtype)
        return Rotary(cos, sin, self.rng.random() < 0.5)

    def _caches(self, heads_kv: int, width: int, width_v: int) -> None:
        self.table = self.places = None
        self.rows: list[tuple[int, int]] = []
        caches, lines = self.batch + 2, self.capacity
        if self.page:
            pages = -(-self.capacity // self.page)
            self.capacity, lines = pages * self.page, self.page
            caches = pages * self.batch + 1
            numbers = self.rng.sample(range(caches), pages * self.batch)
            table = torch.tensor(numbers, dtype=torch.int32).view(self.batch, pages)
            for sequence, before in enumerate(self.before):  # past what is written entries are garbage
                table[sequence, -(-(before + self.news[sequence]) // self.page) :] = GARBAGE
            self.numbers, self.table = table, table.to(self.device)
        elif self.rng.random() < 0.5:
            self.numbers = torch.tensor(self.rng.sample(range(caches), self.batch))
            self.places = self.int32(self.numbers.tolist())
        else:
            self.numbers = torch.arange(self.batch)
        self.k_cache = self.randn(caches, lines, heads_kv, width).transpose(1, 2)
        self.v_cache = self.randn(caches, heads_kv, lines, width_v)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        k_cache, v_cache, queries = self.k_cache.double(), self.v_cache.double(), []
        for sequence, (k, v, before) in enumerate(zip(self.k, self.v, self.before, strict=True)):
            turn = before if self.rotary is None or self.turns is None else self.turns[sequence]
            k = rotated(k, turn + torch.arange(k.shape[1]), self.rotary)
            for row in range(k.shape[1]):
                place = before + row
                if place < self.capacity:
                    cache = int(self.numbers[sequence, place // self.page] if self.page else self.numbers[sequence])
                    line = place % self.page if self.page else place
                    k_cache[cache, :, line], v_cache[cache, :, line] = k[:, row], v[:, row].double()
            if self.rotary is not None:
                steps = torch.arange(self.q[0].shape[1]) * self.moving
                queries.append(rotated(self.q[sequence], turn + steps, self.rotary))
        return k_cache, v_cache, queries


def complaints(seed: int, device: torch.device) -> list[str]:
    """What is wrong with an append; empty where nothing is."""
    drawn = Draw(seed, device)
    k_cache, v_cache, queries = drawn.expected()
    got = append(drawn.append)
    close = TOLERANCES[drawn.dtype]
    found = []
    for name, own, right in (("k_cache", drawn.k_cache, k_cache), ("v_cache", drawn.v_cache, v_cache)):
        if not torch.allclose(own.double(), right, rtol=close, atol=close):
            found.append(f"{name}: off by {(own.double() - right).abs().max():.3g}")
    if (got is None) != (drawn.rotary is None):
        found.append("queries are rotated where none were given, or not where some were")
    elif got is not None:
        right = torch.stack(queries) if drawn.append.cu_seqlens_q is None else torch.cat(queries, 1)[None]
        if not torch.allclose(got.double(), right, rtol=close, atol=close):
            found.append(f"queries: off by {(got.double() - right).abs().max():.3g}")
    return found


def main() -> None:
    """Arguments: the first seed and how many."""
    torch.set_num_threads(1)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({str(seed): complaints(seed, torch.device("cpu")) for seed in range(first, first + count)}))


if __name__ == "__main__":
    main()
