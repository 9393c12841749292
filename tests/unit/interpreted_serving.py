"""The functions for serving by our kernels in Triton's interpreter (run as a script with TRITON_INTERPRET=1).

Prints one JSON object: by case, the largest difference from PyTorch's operators of output, log-sum-exp and caches.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from tests.unit.tensors import i32

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.ops import calls
from flashmoe_science.ops.attention.front import append, choose, sdpa


def both(function: Any, *tensors: torch.Tensor, **options: Any) -> dict[str, object]:
    """The function by our kernels and by PyTorch's operators, each on copies of the tensors that it may change; by a
    stored launch, of other values, where one is stored."""
    results = []
    for kernel in ("split_triton", "sdpa"):
        copies = [one.clone() for one in tensors]
        choose.gpu_of = append.gpu_of = lambda q, gpu=("l4" if kernel == "split_triton" else None): (
            None if gpu is None else gpu_named(gpu)
        )
        function(*[torch.zeros_like(one) for one in tensors], kernel=kernel, **options)
        results.append([*function(*copies, kernel=kernel, **options), *copies])
    pairs = [(a.float(), b.float()) for a, b in zip(*results, strict=True)]
    same_infinities = all(torch.equal(a.isinf(), b.isinf()) and torch.equal(a.isnan(), b.isnan()) for a, b in pairs)
    differences = [((a - b).nan_to_num(0.0, 0.0, 0.0)).abs().max().item() for a, b in pairs]
    return {"difference": max(differences), "same": same_infinities, "dtype": str(results[0][0].dtype)}


def cached(**options: Any) -> dict[str, object]:
    dtype = options.pop("dtype", torch.float32)
    q, k, v = torch.randn(2, 2, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    k_cache, v_cache = torch.randn(6, 8, 2, 16), torch.randn(6, 8, 2, 16)
    tensors = [one.to(dtype) for one in (q, k_cache, v_cache, k, v)]
    return both(fm.flash_attn_with_kvcache, *tensors, return_softmax_lse=True, **options)


def main() -> None:
    torch.manual_seed(0)
    tables = {"rotary_cos": torch.randn(30, 8), "rotary_sin": torch.randn(30, 8)}
    lengths, pages = {"cache_seqlens": i32(3, 6)}, i32(5, 2, 0, 4).view(2, 2)
    report = {
        "append": cached(**lengths, causal=True),
        "rotary": cached(**lengths, **tables, causal=True, rotary_interleaved=False),
        "rotary at one position": cached(**lengths, **tables),
        "pages": cached(cache_seqlens=i32(3, 11), page_table=pages, **tables, window_size=(4, 1)),
        "rows of a table": cached(cache_seqlens=i32(3, 11), page_table=pages.flip(0), cache_batch_idx=i32(1, 0)),
        "batch_idx and leftpad": cached(**lengths, cache_batch_idx=i32(5, 1), cache_leftpad=i32(2, 0), softcap=2.0),
        "chunks": cached(**lengths, attention_chunk=3, causal=True),
        "sinks": cached(**lengths, s_aux=torch.randn(4), num_splits=2),
        "alibi": cached(**lengths, alibi_slopes=torch.rand(4), num_splits=1),
        "bf16": cached(**lengths, dtype=torch.bfloat16),
    }
    cu_q, cu_k = i32(0, 3, 3, 6), i32(0, 2, 4, 9)
    packed = [torch.randn(n, h, 16) for n, h in ((6, 4), (9, 2), (9, 2))]
    for name, options in {"packed": {}, "used rows": {"seqused_q": i32(2, 0, 3), "seqused_k": i32(2, 1, 4)}}.items():
        options |= {"causal": True, "return_attn_probs": True}

        def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
            return fm.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 5, **options)

        report[name] = both(varlen, *packed, **options)
    sdpa._is_on_nvidia = lambda tensor: True
    rows = [torch.randn(2, h, n, 16) for h, n in ((4, 3), (2, 40), (2, 40))]

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, kernel: str) -> Any:
        return (fm.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, kernel=kernel),)

    report["mask"] = both(masked, *rows, torch.rand(2, 1, 3, 40) > 0.3)
    report["bias"] = both(masked, *rows, torch.randn(3, 40))
    public = [one for key, stored in calls.LAUNCHES.items() if len(key) == 6 and key[5] for one in stored]
    direct = [one for one in public if one.launch is not calls.slow_path]
    print(json.dumps(report | {"plans": len(choose.PLANS), "stored": len(direct)}))


if __name__ == "__main__":
    main()
