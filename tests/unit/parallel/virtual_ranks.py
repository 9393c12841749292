"""Rows read from the buffers of ranks that are tensors of one process (run with TRITON_INTERPRET=1). Prints what is wrong."""

from __future__ import annotations

import json

import torch

from flashmoe_science.parallel.peers import pull


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for ranks in (2, 3):
        for rows, width in ((1, 1), (3, 40), (2, 3001)):
            given = torch.randn(ranks, ranks * rows, width).half()  # what each rank has for each
            buffers = [torch.full((ranks * rows * width + 8,), -77, dtype=torch.int16) for _ in range(ranks)]
            for buffer, one in zip(buffers, given, strict=True):
                buffer[: one.numel()] = one.flatten().view(torch.int16)
            addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
            for rank in range(ranks):
                received, everyones = torch.empty(ranks, rows * width).half(), torch.empty(ranks, ranks * rows * width).half()
                pull(addresses, received.view(torch.int16), rank, rank)
                pull(addresses, everyones.view(torch.int16), rank, 0)
                case = f"rank {rank} of {ranks}, {rows} rows of {width}"
                for_it = given.unflatten(1, (ranks, rows))[:, rank].flatten(1)
                wrong = [] if torch.equal(received, for_it) else ["exchange"]
                found[case] = wrong if torch.equal(everyones, given.flatten(1)) else [*wrong, "gather"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
