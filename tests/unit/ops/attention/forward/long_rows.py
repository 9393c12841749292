"""The log-sum-exp of 8192 keys of nearly one score, where all roundings of the sum go one way (run with TRITON_INTERPRET=1).

Prints one JSON object: its largest error, and what it is where a query is not a number and where it sees no key.
"""

from __future__ import annotations

import json

import torch

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops.attention.front import choose


def main() -> None:
    torch.manual_seed(0)
    choose.gpu_of = lambda q: gpu_named("l4")  # whose configs are interpreted; the tensors are on the CPU
    q, k, v = (torch.randn(1, 1, rows, 16) * 2**-10 for rows in (16, 8192, 8192))
    lse = torch.empty(1, 1, 16)
    fm.flash_attention_forward(q, k, v, lse, False, None)
    error = (lse.double() - torch.logsumexp(q.double() @ k.double().mT * 0.25, -1)).abs().max().item()
    fm.flash_attention_forward(torch.full_like(q, torch.nan), k, v, lse, False, None)
    nan = lse.isnan().all().item()
    fm.flash_attention_forward(q, k[:, :, :3].contiguous(), v[:, :, :3].contiguous(), lse, True, None)
    print(json.dumps({"error": error, "nan": nan, "unseen": lse[0, 0, :13].tolist() == [-torch.inf] * 13}))


if __name__ == "__main__":
    main()
