"""Rows written into buffers of ranks that are tensors of one process (run with TRITON_INTERPRET=1). Prints what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops.moe.call import SWIGLU, Rows, Tensors, inputs_of
from flashmoe_science.ops.moe.products.triton import KERNEL
from flashmoe_science.parallel import decode
from flashmoe_science.parallel.own_tokens import can_write, own_tokens, write_own
from flashmoe_science.parallel.peers import dispatch, push, send, sum_received
from flashmoe_science.parallel.transport import Sizes, sums_of

EXPERTS = 3  # of a rank
Buffers = list[torch.Tensor]


def buffers_of(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Buffers, torch.Tensor]:
    """A buffer a rank, full of what no kernel writes, and the addresses."""
    made = [torch.full(shape, -77, dtype=dtype) for _ in range(ranks)]
    return made, torch.tensor([one.data_ptr() for one in made])


def dispatched(sizes: Sizes, ranks: int, of_ids: torch.dtype) -> list[str]:
    """What is wrong with what every rank is given of tokens that are fewer on each rank, and their routing."""
    top_k, places = sizes.top_k, ranks * sizes.tokens
    parts = [(places, sizes.hidden), sizes.dtype], [(places, top_k), torch.float32], [(places, top_k), torch.int32]
    buffers, addresses = zip(*(buffers_of(ranks, *part) for part in parts), strict=True)
    xs, weights, everyones = [], [], []
    for rank in range(ranks):
        tokens = max(0, sizes.tokens - rank)
        x, weight = torch.randn(tokens, sizes.hidden).to(sizes.dtype), torch.rand(tokens, top_k).bfloat16()
        ids = torch.randint(-1, ranks * EXPERTS + 1, (tokens, top_k), dtype=of_ids)
        if of_ids == torch.int64 and tokens:
            ids[0] = 2**32  # whose lower half is an expert's
        dispatch(addresses, (x, weight, ids), sizes, rank)
        empty = torch.zeros(sizes.tokens - tokens, 1)
        xs.append(torch.cat((x, empty.to(x).expand(-1, sizes.hidden))))
        weights.append(torch.cat((weight.float(), empty.expand(-1, top_k))))
        everyones.append(torch.cat((ids, empty.to(ids).expand(-1, top_k) - 1)))
    wrong, ids = [], torch.cat(everyones)
    for rank in range(ranks):
        local = ids - rank * EXPERTS
        right = torch.cat(xs), torch.cat(weights), torch.where((local >= 0) & (local < EXPERTS), local, -1).int()
        for name, part, one in zip(("x", "weights", "ids"), buffers, right, strict=True):
            wrong += [] if torch.equal(part[rank], one) else [f"{name} of rank {rank}"]
    dispatch(addresses, (xs[0][:1], None, None), sizes, 0)
    alone = torch.cat((xs[0][:1], torch.zeros_like(xs[0][1:])))
    same = all(torch.equal(one[: sizes.tokens], alone) for one in buffers[0])
    return wrong if same else [*wrong, "x alone"]


def results(sizes: Sizes, ranks: int) -> list[str]:
    """What is wrong with results of rows that ranks have for all tokens, in an order of their own."""
    tokens, width, top_k, *_ = sizes
    ids = torch.randint(-1, ranks * EXPERTS + 1, (ranks * tokens, top_k))
    weights, of_choices = torch.rand(ids.shape), torch.randn(*ids.shape, width).to(sizes.dtype)
    exact, to_exact = buffers_of(ranks, (tokens * top_k, width), sizes.dtype)
    reduced, to_reduced = buffers_of(ranks, (ranks * tokens, width), sizes.dtype)
    partial = []
    for rank in range(ranks):
        here = (ids >= rank * EXPERTS) & (ids < (rank + 1) * EXPERTS)
        order = torch.randperm(int(here.sum()))
        rows, places = torch.full((ids.numel(), width), torch.nan).to(sizes.dtype), torch.full(ids.shape, -1)
        places[here] = order
        rows[order] = of_choices[here]
        made = Rows(None, rows, torch.cat((torch.full((ids.numel(),), -9), places.flatten())).int())
        send(to_exact, made, None, sizes, rank)
        send(to_reduced, made, weights, sizes, rank)
        partial.append(sums_of(rows, weights, places))
    wrong, every = [], torch.arange(ranks * tokens).view(ranks, tokens).t()
    for rank in range(ranks):
        own = slice(rank * tokens, (rank + 1) * tokens)
        received = torch.cat([one[own] for one in partial])
        wrong += [] if torch.allclose(reduced[rank], received, rtol=1e-2, atol=1e-2) else [f"what rank {rank} receives"]
        out = torch.full((tokens, width), torch.nan).to(sizes.dtype)
        sum_received(reduced[rank], out, sizes, ranks)
        wrong += [] if torch.equal(out, sums_of(reduced[rank], None, every)) else [f"reduced of rank {rank}"]
        out.fill_(torch.nan)
        sum_received(exact[rank], out, sizes, ranks, weights[own], ids[own])
        chosen = (ids[own] >= 0) & (ids[own] < ranks * EXPERTS)
        places = torch.where(chosen, torch.arange(tokens * top_k).view(tokens, -1), -1)
        right = sums_of(of_choices[own].flatten(0, 1), weights[own], places)
        wrong += [] if torch.allclose(out, right, rtol=1e-2, atol=1e-2) else [f"exact of rank {rank}"]
    return wrong


def layer(sizes: Sizes, ranks: int) -> list[str]:
    """What is wrong with a layer whose ranks' products send their rows: exact results are one kernel's of all tokens."""
    (tokens, width, top_k, *_), experts, hidden = sizes, ranks * EXPERTS, 16
    x, weights = torch.randn(ranks * tokens, width).to(sizes.dtype), torch.rand(ranks * tokens, top_k)
    w1, w2 = torch.randn(experts, 2 * hidden, width).to(x), torch.randn(experts, width, hidden).to(x)
    ids = torch.randint(-1, experts + 1, weights.shape, dtype=torch.int32)
    inputs = inputs_of(Tensors(x, w1 / 8, w2 / 8, weights, ids), SWIGLU)
    config = KERNEL.configs(inputs.problem, gpu_named("h200"))[0]
    whole = KERNEL.plan(inputs, config)(inputs, x.shape)(*inputs.tensors)
    exact, to_exact = buffers_of(ranks, (tokens * top_k, width), sizes.dtype)
    reduced, to_reduced = buffers_of(ranks, (ranks * tokens, width), sizes.dtype)
    for rank in range(ranks):
        own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
        given = Tensors(x, w1[own] / 8, w2[own] / 8, weights, ids - own.start)
        part = replace(inputs_of(given, SWIGLU), sums=False)
        rows = KERNEL.plan(part, config)(part, x.shape)(*part.tensors)
        send(to_exact, rows, None, sizes, rank)
        send(to_reduced, rows, weights, sizes, rank)
    wrong = []
    for rank in range(ranks):
        own, out = slice(rank * tokens, (rank + 1) * tokens), torch.full((tokens, width), torch.nan).to(x)
        sum_received(exact[rank], out, sizes, ranks, weights[own], ids[own])
        wrong += [] if torch.equal(out, whole[own]) else [f"exact of rank {rank} is not one kernel's"]
        sum_received(reduced[rank], out, sizes, ranks)
        wrong += (
            [] if torch.allclose(out, whole[own], rtol=1e-2, atol=1e-2) else [f"reduced of rank {rank} is not one kernel's"]
        )
    return wrong


def exchanged(sizes: Sizes, ranks: int) -> list[str]:
    """What is wrong with what each rank is given of what each has for each."""
    given = torch.randn(ranks, ranks, sizes.tokens * sizes.hidden).half()
    buffers, addresses = buffers_of(ranks, given.shape[1:], torch.float16)
    for rank in range(ranks):
        push(addresses, given[rank].view(torch.int16), rank)
    return [f"exchange of rank {rank}" for rank in range(ranks) if not torch.equal(buffers[rank], given[:, rank])]


def taken(batch: int, ranks: int, dtype: torch.dtype, strided: bool) -> list[str]:
    """What is wrong with the lengths and the new tokens that each rank takes for its own, packed and written into caches: of
    those of sequence 0 there is no room, or no such page."""
    lengths, rows = torch.randint(0, 50, (batch,), dtype=torch.int32), 7
    k, v = torch.randn(batch, 1, 3, 40).to(dtype), torch.randn(batch, 1, 3, 24).to(dtype)
    if strided:
        k, v = torch.cat((k, k, v), -1).transpose(1, 2).contiguous().transpose(1, 2).split((40, 40, 24), -1)[::2]
    pages = torch.randperm(batch * 8).int().view(batch, 8)
    pages[0] = -1 if batch > 5 else batch * 8
    wrong, written = [], 0
    for rank in range(ranks):
        found, right = own_tokens(lengths, k, v, rank, ranks), decode._own(lengths, k, v, (k, v, None), True, rank, ranks)
        held = int(right[3][-1])
        written += held
        alike = torch.equal(found[0], right[0]) and torch.equal(found[3], right[3])
        alike &= all(torch.equal(found[n][:held].float(), right[n][:held].float()) for n in (1, 2))
        alike &= torch.equal(own_tokens(lengths, None, None, rank, ranks)[0], right[0])
        wrong += [] if alike else [f"tokens of rank {rank}"]
        for table in (None, pages):
            shape = (batch * 8, rows) if table is not None else (batch, 50 // ranks)
            caches = [torch.full((*shape, 3, one.shape[3]), -7.0).to(dtype) for one in (k, v)]
            grown = [one.clone() for one in caches]
            for n, length in enumerate(lengths.tolist()):
                at = length // ranks
                row, place = (n, at) if table is None else (int(table[n, at // rows]), at % rows)
                if length % ranks == rank and 0 <= row < shape[0] and place < shape[1]:
                    for cache, one in zip(grown, (k, v), strict=True):
                        cache.view(torch.uint8)[row, place] = one.contiguous().view(torch.uint8)[n, 0]
            counted = write_own(lengths, k, v, *caches, table, rank, ranks)
            same = all(torch.equal(one.float(), other.float()) for one, other in zip(caches, grown, strict=True))
            same &= can_write(k, v, *caches, table) and torch.equal(counted, right[0] + right[3].diff())
            wrong += [] if same else [f"caches of rank {rank}, pages {table is not None}"]
    return wrong if written == batch else [*wrong, f"{written} new tokens"]


def main() -> None:
    torch.manual_seed(0)
    found = {
        f"{batch} new tokens on {ranks} ranks, {dtype}, strided {strided}": taken(batch, ranks, dtype, strided)
        for batch, ranks, dtype, strided in (
            (1, 2, torch.bfloat16, False), (9, 3, torch.float32, True), (300, 2, torch.float8_e4m3fn, True)
        )
    }  # fmt: skip
    for ranks in (2, 3):
        for tokens, width, top_k in ((1, 1, 1), (3, 40, 3), (2, 5000, 2)):
            for dtype, of_ids in ((torch.float16, torch.int32), (torch.float32, torch.int64)):
                sizes = Sizes(tokens, width, top_k, EXPERTS, dtype)
                case = f"{ranks} ranks, {tokens} tokens of {width}, {top_k} choices, {dtype}, {of_ids}"
                found[case] = layer(sizes, ranks) if width < 1000 else []
                found[case] += dispatched(sizes, ranks, of_ids) + results(sizes, ranks) + exchanged(sizes, ranks)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
