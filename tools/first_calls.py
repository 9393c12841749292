"""Time first calls on this GPU: with an empty cache of Triton's on disk, with a full one, and after a warmup.

    python tools/first_calls.py --out FILE

Each measurement is a process of its own. A call's time ends with a synchronisation; PyTorch and CUDA are ready before it.
``decoding`` grows a cache from 1 to 4096 keys by ``scaled_dot_product_attention``, a call for each number of keys.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_READY = """
import json, sys, time
import torch
at = time.perf_counter()
import flashmoe_science as fm
fm.scaled_dot_product_attention, fm.flash_attn_with_kvcache, fm.fused_moe
imported = time.perf_counter() - at

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device="cuda")

def timed(call):
    torch.cuda.synchronize()
    at = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - at

q, kv = zeros(1, 32, 4096, 128), zeros(1, 8, 4096, 128)
torch.nn.functional.scaled_dot_product_attention(q[:, :8], kv, kv)
"""
_FIRST = """
cache, one, lengths = zeros(1, 4096, 8, 128), zeros(1, 1, 32, 128), torch.full((1,), 4000, dtype=torch.int32, device="cuda")
experts = zeros(16, 2048), zeros(128, 1536, 2048), zeros(128, 2048, 768), torch.rand(16, 8, device="cuda")
ids = torch.arange(128, device="cuda").view(16, 8)
calls = {
    "prefill": lambda: fm.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True),
    "decode": lambda: fm.flash_attn_with_kvcache(one, cache, cache, cache_seqlens=lengths, causal=True),
    "experts": lambda: fm.fused_moe(*experts, ids),
}
print(json.dumps({"import": imported} | {name: timed(call) for name, call in calls.items()}))
"""
_DECODING = """
from flashmoe_science.ops.launch import kernels_loaded
found = {}
if sys.argv[1:] == ["warmup"]:
    warmed = fm.warmup(heads=32, heads_kv=8, head_dim=128, max_seqlen=4096, report=lambda line: print(line, file=sys.stderr))
    found = {"warmup": warmed.seconds, "kernels": warmed.kernels}
before = kernels_loaded()
one = zeros(1, 32, 1, 128)
steps = []
for n in range(1, 4097):
    keys = kv[:, :, :n]
    steps.append(timed(lambda: fm.scaled_dot_product_attention(one, keys, keys, enable_gqa=True)))
found["loaded while decoding"] = kernels_loaded() - before
print(json.dumps(found | {"slowest step": max(steps), "all steps": sum(steps)}))
"""
_COMMAND = ("warmup", "--heads", "32", "--heads-kv", "8", "--head-dim", "128", "--max-seqlen", "4096")


def measured(code: str, cache: str, *arguments: str) -> dict[str, float]:
    """What a process prints that finds Triton's cache in that folder, with how many kernels it added to it."""
    before = _kernels(cache)
    words = [sys.executable, "-c", _READY + code, *arguments]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found | {"compiled": _kernels(cache) - before}


def _kernels(cache: str) -> int:
    return len([*Path(cache).rglob("*.cubin")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    out: Path = parser.parse_args().out
    rows: dict[str, Any] = {}

    def row(name: str, *given: str) -> None:
        rows[name] = found = measured(*given)
        print(f"{name}: {', '.join(f'{what} {value:.3g}' for what, value in found.items())}", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        for name in ("first calls, empty cache", "first calls, full cache"):
            row(name, _FIRST, cache)
    with tempfile.TemporaryDirectory() as cache:
        for name in ("decoding, empty cache", "decoding, full cache"):
            row(name, _DECODING, cache)
    with tempfile.TemporaryDirectory() as cache:
        for name in ("decoding after warmup, empty cache", "decoding after warmup, full cache"):
            row(name, _DECODING, cache, "warmup")
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "flashmoe_science", *_COMMAND]
        subprocess.run(command, check=True, env=os.environ | {"TRITON_CACHE_DIR": cache})
        row("decoding after `flashmoe warmup` and warmup", _DECODING, cache, "warmup")
    from record import write_record

    write_record(out, {"rows": rows})


if __name__ == "__main__":
    main()
