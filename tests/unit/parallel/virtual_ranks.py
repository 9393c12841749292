"""Rows read from the buffers of ranks that are tensors of one process (run with TRITON_INTERPRET=1). Prints what is wrong."""

from __future__ import annotations

import json

import torch

from flashmoe_science.parallel.peers import pull, pull_sums
from flashmoe_science.parallel.transport import sums_of


def sums(addresses: torch.Tensor, received: torch.Tensor, rank: int, ranks: int) -> list[str]:
    """What is wrong with sums of the rows that a rank would receive."""
    rows, width = len(received) // ranks, received.shape[1]
    places = torch.randint(-1, len(received), (4, 3))
    weights = torch.rand(4, 3)
    out = torch.full((4, width), torch.nan).half()
    pull_sums(addresses, out, rows, rank, weights, places)
    wrong = [] if torch.allclose(out, sums_of(received, weights, places), rtol=1e-3) else ["weighted sums"]
    of_ranks = torch.full((rows, width), torch.nan).half()
    pull_sums(addresses, of_ranks, rows, rank, None, None)
    every = torch.arange(len(received)).view(ranks, rows).t()
    return wrong if torch.equal(of_ranks, sums_of(received, None, every)) else [*wrong, "sums of ranks"]


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for ranks in (2, 3):
        for rows, width in ((1, 1), (3, 40), (2, 3001)):
            given = torch.randn(ranks, ranks * rows, width).half()  # what each rank has for each
            buffers = [torch.full((ranks * rows * width + 8,), -77, dtype=torch.int16) for _ in range(ranks)]
            behind = [torch.full((8 + buffer.numel(),), -77, dtype=torch.int16) for buffer in buffers]
            for buffer, other, one in zip(buffers, behind, given, strict=True):
                buffer[: one.numel()] = one.flatten().view(torch.int16)
                other[8:] = buffer
            addresses_behind = torch.tensor([buffer.data_ptr() for buffer in behind])
            addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
            for rank in range(ranks):
                received, everyones = torch.empty(ranks, rows * width).half(), torch.empty(ranks, ranks * rows * width).half()
                pull(addresses, received.view(torch.int16), rank, rank)
                pull(addresses_behind, everyones.view(torch.int16), rank, 0, 8)
                case = f"rank {rank} of {ranks}, {rows} rows of {width}"
                for_it = given.unflatten(1, (ranks, rows))[:, rank].flatten(1)
                wrong = [] if torch.equal(received, for_it) else ["exchange"]
                wrong += [] if torch.equal(everyones, given.flatten(1)) else ["gather"]
                found[case] = wrong + sums(addresses, for_it.reshape(-1, width), rank, ranks)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
