"""Rows that other ranks computed, combined (run with TRITON_INTERPRET=1). Prints one JSON object: by case, what is wrong."""

from __future__ import annotations

import json

import torch

from flashmoe_science.ops.moe.combine import combined


def in_order(rows: torch.Tensor, weights: torch.Tensor, row_of_pair: torch.Tensor) -> torch.Tensor:
    """A product and a sum a choice, each rounded to fp32, as in a call of one process."""
    total = torch.zeros(weights.shape[0], rows.shape[1])
    for place in range(weights.shape[1]):
        here = row_of_pair[:, place : place + 1]
        total += torch.where(here >= 0, weights[:, place : place + 1].float() * rows[here[:, 0].clamp(min=0)].float(), 0.0)
    return total.to(rows.dtype)


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for tokens, top_k, dim in ((1, 1, 8), (5, 3, 40), (4, 8, 1500), (0, 2, 16)):
        for dtype in (torch.float32, torch.float16):  # the interpreter rounds to bf16 in its own way
            rows = torch.randn(tokens * top_k * 2 + 1, dim).to(dtype)
            place = torch.randperm(rows.shape[0])[: tokens * top_k].view(tokens, top_k)
            place = torch.where(torch.rand(place.shape) < 0.2, -1, place)
            rows[[n for n in range(rows.shape[0]) if n not in place.flatten().tolist()]] = torch.nan
            weights = torch.randn(tokens, top_k)
            same = torch.equal(combined(rows, weights, place), in_order(rows, weights, place))
            found[f"{tokens} tokens, {top_k} choices, {dim} columns, {dtype}"] = [] if same else ["other bits"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
