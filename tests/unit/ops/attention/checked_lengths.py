"""Lengths drawn at random, right and wrong, by the kernel that checks them on a GPU and by the words of the CPU.

Run as a script with TRITON_INTERPRET=1 it prints one JSON object: how many were refused, and the draws on which the two differ.
"""

from __future__ import annotations

import json
import random
import sys

import torch

from flashmoe_science.ops.attention.call.lengths import Lengths, check_lengths
from flashmoe_science.ops.attention.device.check_triton import is_wrong


def draw(seed: int, device: str = "cpu") -> Lengths:
    """Lengths that are right but, mostly, in one number."""
    rng = random.Random(seed)
    batch, page, pages = rng.randint(1, 5), rng.choice([1, 4, 16]), rng.randint(1, 6)
    capacity, caches = page * pages, batch * pages + 2

    def i32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def spoilt(values: list[int]) -> list[int]:
        values = [*values]
        if rng.random() < 0.12:
            values[rng.randrange(len(values))] += rng.choice([-9, -1, 1, 9, 10**9, -(2**31)])
        return [max(-(2**31), one) for one in values]

    def starts(counts: list[int]) -> torch.Tensor:
        return i32(spoilt([sum(counts[:n]) for n in range(batch + 1)]))

    counts, keys = ([rng.randint(0, most) for _ in range(batch)] for most in (5, capacity))
    kind = rng.choice(["packed", "cache", "cache", "pages", "pages", "append", "append"])
    one = Lengths(
        tokens_q=sum(counts) + rng.randint(0, 2), longest_q=max(counts) + rng.choice([0, 0, 1, -1]), capacity=capacity
    )
    if rng.random() < 0.5 or kind == "packed":
        one = one._replace(cu_seqlens_q=starts(counts))
    if kind == "packed":
        used = i32(spoilt([rng.randint(0, n) for n in keys])) if rng.random() < 0.5 else None
        total, longest = sum(keys) + rng.randint(0, 2), rng.choice([None, max(keys), max(keys), max(keys) - 1])
        return one._replace(cu_seqlens_k=starts(keys), cache_seqlens=used, tokens_k=total, longest_k=longest)
    new = [rng.randint(0, 3) for _ in range(batch)] if kind == "append" else [0] * batch
    held = [max(0, n - more) for n, more in zip(keys, new, strict=True)]
    one = one._replace(
        cache_seqlens=i32(spoilt(held)), caches=caches, longest_k=rng.choice([None, None, capacity, capacity - 1])
    )
    if kind == "append":
        rotary = rng.choice([0, capacity + 5, capacity])
        one = one._replace(positions=rotary, queries=rng.randint(0, 4), one_position=rng.random() < 0.5, longest_k=None)
        one = one._replace(cu_seqlens_new=starts(new), new=sum(new)) if rng.random() < 0.5 else one._replace(new=min(new))
        if rng.random() < 0.5:
            one = one._replace(rotary_seqlens=i32(spoilt([rng.randint(0, max(0, rotary - 5)) for _ in range(batch)])))
    if kind == "pages" or (kind == "append" and rng.random() < 0.5):
        numbers = [rng.randrange(caches) for _ in range(batch * pages)]
        table = i32(spoilt(numbers)).view(batch, pages)
        for row, used in enumerate(held):
            table[row, -(-(used + new[row]) // page) :] = 2**31 - 1  # past a length an entry may be anything
        return one._replace(page_table=table, page=page)
    if rng.random() < 0.5:
        one = one._replace(cache_batch_idx=i32(spoilt([rng.randrange(caches) for _ in range(batch)])))
    return one._replace(leftpad=i32(spoilt([rng.randint(0, n) for n in held]))) if rng.random() < 0.5 else one


def refusal(one: Lengths) -> str:
    """The words of the CPU, "" where it refuses nothing."""
    try:
        check_lengths(one)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    """Arguments: the first seed and how many."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    drawn = {seed: draw(seed) for seed in range(first, first + count)}
    words = {seed: refusal(one) for seed, one in drawn.items()}
    differ = [(seed, words[seed]) for seed, one in drawn.items() if is_wrong(one) is not bool(words[seed])]
    print(json.dumps({"refused": sum(map(bool, words.values())), "differ": differ}))


if __name__ == "__main__":
    main()
