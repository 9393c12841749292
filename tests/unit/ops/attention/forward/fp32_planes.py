"""Whether the planes of fp32_gluon_sm90 add up to Q, K and V to the last bit (run with TRITON_INTERPRET=1): a JSON object."""

from __future__ import annotations

import json

import torch

from flashmoe_science.ops.attention.forward.fp32_sm90 import config, planes

BATCH, HEADS, HEADS_KV, QUERIES, KEYS, DIM, DIM_V = 2, 3, 1, 5, 7, 17, 6


def main() -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, QUERIES, HEADS, DIM, generator=random).transpose(1, 2)
    k = torch.randn(BATCH, HEADS_KV, KEYS, DIM, generator=random)
    v = torch.randn(BATCH, HEADS_KV, KEYS, DIM_V, generator=random)
    v[0, 0, 0, :3] = torch.tensor([torch.finfo(torch.float32).max, torch.inf, 1e-30])  # the first would round to infinity
    tensors = {"q": q, "k": k, "v": v}
    written = [
        torch.full((3, *one.shape[:3], -(-one.shape[3] // 8) * 8), torch.nan, dtype=torch.bfloat16) for one in tensors.values()
    ]
    blocks = config.plane_blocks(BATCH * HEADS * QUERIES, BATCH * HEADS_KV * KEYS)
    planes.flashmoe_fp32_planes[(sum(blocks), 1, 1)](
        *tensors.values(), *written, *[step for one in tensors.values() for step in one.stride()[:3]],
        HEADS, HEADS_KV, BATCH * HEADS, BATCH * HEADS_KV, QUERIES, KEYS, *blocks[:2],
        D=DIM, DV=DIM_V, WIDTH=24, WIDTH_V=8, BLOCK_D=32, BLOCK_R=planes.SPLIT_ROWS, EARLY_START=False,
    )  # fmt: skip
    found = {}
    for (name, one), parts in zip(tensors.items(), written, strict=True):
        whole = torch.nn.functional.pad(one.double(), (0, parts.shape[-1] - one.shape[3]))
        found[name] = torch.equal(parts.double().sum(0), whole)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
