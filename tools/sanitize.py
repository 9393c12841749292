"""compute-sanitizer's memcheck and racecheck around one call of each kernel, on shapes of a few tiles.

    python tools/sanitize.py --out FILE [--only WORD ...] [--jobs 8] [--most-s 50]
    python tools/sanitize.py --call NAME          # the call itself, as the tool runs it

Every call is compared with the same call on the CPU, which PyTorch's operators serve. It is made once without the tool, which
also fills Triton's cache. Inputs come from the CPU, so that no kernel of others is looked at, and every tensor is an allocation
of its own, so that a byte past its end is nobody's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import torch

import flashmoe_science as fms
from flashmoe_science.ops.moe.products import grouped
from flashmoe_science.ops.moe.route.route import route_with_losses

CHECKS = ("memcheck", "racecheck")
_MOST_ERROR = 0.02  # RMS, relative to the CPU's
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (.*)")
_CLEAN = re.compile(r"\b0 errors|relative error")
_PLACES = "/usr/local/cuda*/bin/compute-sanitizer"


# The calls -------------------------------------------------------------------------------------------------------------------


def _apart() -> None:
    """Give each intermediate buffer of two launches an allocation of its own."""

    def allocator(on_gpu: bool, parts: Sequence[tuple[int, torch.dtype]]) -> Callable[[], tuple[Any, ...]]:
        def take() -> tuple[Any, ...]:
            tensors = [torch.empty(elements, dtype=dtype, device="cuda") for elements, dtype in parts]
            return (tensors, *(one.data_ptr() for one in tensors))

        return take

    setattr(grouped, "workspace_allocator", allocator)  # noqa: B010  # mypy: it is not a name that the module exports


def _normal(*shape: int, width: int = 1) -> Any:
    return (torch.randn(shape) * width**-0.5).bfloat16()


def _moe(kernel: str, tokens: int, experts: int, top_k: int, dim: int, hidden: int) -> Callable[[str], Any]:
    """``route``, then ``fused_moe`` by one kernel. Token 0 has an id that is no expert's."""
    x, logits = _normal(tokens, dim), torch.randn(tokens, experts)
    w1, w2 = _normal(experts, 2 * hidden, dim, width=dim), _normal(experts, dim, hidden, width=hidden)

    def call(device: str) -> Any:
        weights, ids = fms.route(logits.to(device), top_k, normalize="sum")
        ids, stranger = ids.cpu(), torch.tensor(-1, dtype=ids.dtype)
        ids[0, 0] = stranger
        tensors = (one.to(device) for one in (x, w1, w2, weights, ids))
        return (fms.fused_moe(*tensors, kernel=kernel if device == "cuda" else None),)

    return call


def _grouped_router() -> Callable[[str], Any]:
    """DeepSeek-V3's router, whose experts are an odd number a group."""
    logits, bias = torch.randn(37, 60), torch.randn(60)
    groups: dict[str, Any] = {"scoring": "sigmoid", "normalize": "sum", "groups": 4, "top_k_groups": 2}

    def call(device: str) -> Any:
        return fms.route(logits.to(device), 3, selection_bias=bias.to(device), **groups)

    return call


def _forward(kernel: str, queries: int = 200, keys: int = 333, fp32: bool = False) -> Callable[[str], Any]:
    q, k, v = _normal(1, 2, queries, 64), _normal(1, 1, keys, 64), _normal(1, 1, keys, 64)

    def call(device: str) -> Any:
        named = kernel if device == "cuda" else None
        a, b, c = (one.to(device).float() if fp32 else one.to(device) for one in (q, k, v))
        return (fms.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True, kernel=named),)

    return call


def _masked(keys: int, additive: bool) -> Callable[[str], Any]:
    """A mask or a bias of each head, whose rows have ``keys`` elements."""
    q, k, v, mask = _normal(1, 2, 200, 64), _normal(1, 1, keys, 64), _normal(1, 1, keys, 64), _normal(1, 2, 200, keys)
    given = mask if additive else mask > torch.tensor(-0.5)

    def call(device: str) -> Any:
        named = "fwd_gluon_sm90" if device == "cuda" else None
        a, b, c, m = (one.to(device) for one in (q, k, v, given))
        return (fms.scaled_dot_product_attention(a, b, c, attn_mask=m, enable_gqa=True, kernel=named),)

    return call


def _packed(left: int = -1, paged: bool = False) -> Callable[[str], Any]:
    """Four sequences, one of no query and one of more queries than keys, the keys in pages of 16 rows or packed."""
    queries, keys = (0, 150, 150, 250, 333), (0, 200, 300, 390, 433)
    q, k, v = _normal(queries[-1], 4, 64), _normal(keys[-1], 2, 64), _normal(keys[-1], 2, 64)
    starts = [torch.tensor(one, dtype=torch.int32) for one in (queries, keys)]
    caches = _normal(30, 16, 2, 64), _normal(30, 16, 2, 64)
    table, lengths = torch.randperm(30)[:28].view(4, 7).int(), torch.tensor([112, 100, 90, 43], dtype=torch.int32)

    def call(device: str) -> Any:
        named = "fwd_gluon_sm90" if device == "cuda" else None
        more: dict[str, Any] = {"causal": True, "window_size": (left, -1), "kernel": named}
        a, b, c, d, e, of_q, of_k, pages, used = (one.to(device) for one in (q, k, v, *caches, *starts, table, lengths))
        if paged:
            more |= {"cu_seqlens_q": of_q, "max_seqlen_q": 150, "page_table": pages, "cache_seqlens": used}
            return (fms.flash_attn_with_kvcache(a, d, e, **more),)
        return (fms.flash_attn_varlen_func(a, b, c, of_q, of_k, 150, 200, **more),)

    return call


def _decode(kernel: str, paged: bool, appended: int) -> Callable[[str], Any]:
    """Two sequences over a cache, in two splits; with ``appended`` new keys, rotated as they are appended."""
    q = _normal(2, 1, 4, 64)
    shape = (9, 48, 1, 64) if paged else (2, 205, 1, 64)
    keys, values, new = _normal(*shape), _normal(*shape), (_normal(2, appended, 1, 64), _normal(2, appended, 1, 64))
    lengths = torch.tensor([180, 77], dtype=torch.int32)
    table = torch.tensor([[8, 1, 7, 2, 6], [0, 5, 3, 4, 3]], dtype=torch.int32) if paged else None
    angle = torch.randn(256, 16)

    def call(device: str) -> Any:
        def there(tensor: Any) -> Any:
            return None if tensor is None else tensor.to(device, copy=True)

        more = {"page_table": there(table), "num_splits": 2, "causal": True}
        if appended:
            more |= {"rotary_cos": there(angle.cos().bfloat16()), "rotary_sin": there(angle.sin().bfloat16())}
            more |= {"k": there(new[0]), "v": there(new[1])}
        cached = there(keys), there(values)
        named = kernel if device == "cuda" else None
        out = fms.flash_attn_with_kvcache(there(q), *cached, cache_seqlens=there(lengths), kernel=named, **more)
        return (out, *cached)

    return call


def _unequal(kernel: str, paged: bool) -> Callable[[str], Any]:
    """17 sequences: one much longer than the others, so that programs share keys in ranges; then all of one length."""
    q = _normal(17, 1, 8, 64)
    keys, values = (_normal(*((2176, 16, 8, 64) if paged else (17, 2048, 8, 64))) for _ in range(2))
    lengths = torch.randint(1, 60, (17,), dtype=torch.int32)
    lengths[11] = torch.tensor(2000)
    table = torch.randperm(2176).view(17, 128).int() if paged else None

    def call(device: str) -> Any:
        named = kernel if device == "cuda" else None
        pages = None if table is None else table.to(device)
        a, b, c = (one.to(device) for one in (q, keys, values))
        used = (one.to(device) for one in (lengths, torch.full_like(lengths, 77)))
        return tuple(fms.flash_attn_with_kvcache(a, b, c, cache_seqlens=one, page_table=pages, kernel=named) for one in used)

    return call


def _gradients(kernel: str, queries: int, keys: int, dim: int = 64, dim_v: int = 64) -> Callable[[str], Any]:
    """Of two query heads that share keys, under a causal mask."""
    shapes = (2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, dim_v), (2, 4, queries, dim_v)
    *given, dout = (_normal(*shape) for shape in shapes)

    def call(device: str) -> Any:
        q, k, v = (one.to(device).requires_grad_() for one in given)
        named = kernel if device == "cuda" else None
        out = fms.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, kernel=named)
        return torch.autograd.grad(out, (q, k, v), dout.to(device))

    return call


def _packed_gradients(kernel: str, left: int = -1) -> Callable[[str], Any]:
    """Three sequences, one of none, of which the second has more queries than keys."""
    queries, keys = (0, 150, 150, 333), (0, 200, 300, 390)
    *given, dout = (_normal(rows, heads, 64) for rows, heads in ((333, 4), (390, 2), (390, 2), (333, 4)))
    starts = [torch.tensor(one, dtype=torch.int32) for one in (queries, keys)]

    def call(device: str) -> Any:
        q, k, v = (one.to(device).requires_grad_() for one in given)
        of_q, of_k = (one.to(device) for one in starts)
        named = kernel if device == "cuda" else None
        out = fms.flash_attn_varlen_func(q, k, v, of_q, of_k, 183, 200, causal=True, window_size=(left, -1), kernel=named)
        return torch.autograd.grad(out, (q, k, v), dout.to(device))

    return call


def _moe_gradients(kernel: str, tokens: int, experts: int, dim: int, hidden: int) -> Callable[[str], Any]:
    logits, dout = torch.randn(tokens, experts), _normal(tokens, dim)
    weights = _normal(experts, 2 * hidden, dim, width=dim), _normal(experts, dim, hidden, width=hidden)
    given = _normal(tokens, dim), *weights

    def call(device: str) -> Any:
        leaves = [one.to(device).requires_grad_() for one in given]
        chosen, ids = fms.route(logits.to(device), 2, normalize="sum")
        x, w1, w2 = leaves
        out = fms.fused_moe(x, w1, w2, chosen, ids, kernel=kernel if device == "cuda" else None)
        return torch.autograd.grad(out, leaves, dout.to(device))

    return call


def _adapted_gradients(tokens: int, experts: int, dim: int, hidden: int, rank: int) -> Callable[[str], Any]:
    """Of the adapters of frozen experts, of their input, and of the router with its losses."""
    w1, w2 = _normal(experts, 2 * hidden, dim, width=dim), _normal(experts, dim, hidden, width=hidden)
    sizes = ((rank, dim), (2 * hidden, rank), (rank, hidden), (dim, rank))
    given = (_normal(tokens, dim), torch.randn(tokens, experts), *(_normal(experts, *one, width=one[1]) for one in sizes))
    dout, named = _normal(tokens, dim), "moe_grouped_gluon_sm90"

    def call(device: str) -> Any:
        leaves = [one.to(device).requires_grad_() for one in given]
        x, logits, a1, b1, a2, b2 = leaves
        weights, ids, balance, z = route_with_losses(logits, None, 2, "softmax", "sum", 1, None, 1.0)
        of_both = (a1, b1, 0.5), (a2, b2, 2.0)
        kernel = named if device == "cuda" else None
        out = fms.fused_moe(x, w1.to(device), w2.to(device), weights, ids, adapters=of_both, kernel=kernel)
        return torch.autograd.grad([out, balance, z], leaves, [dout.to(device), None, None])

    return call


def _moe_in_format(kernel: str, form: str, tokens: int, experts: int, dim: int, hidden: int) -> Callable[[str], Any]:
    x, logits = _normal(tokens, dim), torch.randn(tokens, experts)
    w1, w2 = _normal(experts, 2 * hidden, dim, width=dim), _normal(experts, dim, hidden, width=hidden)
    weights = fms.quantize_experts(w1, w2, form)

    def call(device: str) -> Any:
        chosen, ids = fms.route(logits.to(device), 2, normalize="sum")
        there: dict[str, Any] = {
            name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in weights.items()
        }
        named = kernel if device == "cuda" else None
        return (fms.fused_moe(x.to(device), top_k_weights=chosen, top_k_ids=ids, kernel=named, **there),)

    return call


CALLS: dict[str, Callable[[], Callable[[str], Any]]] = {
    "moe_route": _grouped_router,
    "moe_gemv_triton": partial(_moe, "moe_gemv_triton", 3, 6, 2, 72, 40),
    "moe_grouped_triton": partial(_moe, "moe_grouped_triton", 300, 5, 2, 72, 40),
    "moe_grouped_gluon_sm90": partial(_moe, "moe_grouped_gluon_sm90", 300, 3, 2, 328, 136),
    "fwd_triton": partial(_forward, "fwd_triton"),
    "short_gluon": partial(_forward, "short_gluon", 70, 90),
    "fwd_gluon_sm90": partial(_forward, "fwd_gluon_sm90"),
    "fwd_gluon_sm90, a bias": partial(_masked, 336, True),
    "fwd_gluon_sm90, a mask": partial(_masked, 333, False),
    "fwd_gluon_sm90, packed": _packed,
    "fwd_gluon_sm90, packed, a window": partial(_packed, left=70),
    "fwd_gluon_sm90, packed, pages": partial(_packed, paged=True),
    "fp32_gluon_sm90": partial(_forward, "fp32_gluon_sm90", fp32=True),
    "chunk_gluon_sm90": partial(_forward, "chunk_gluon_sm90", 20, 1500),
    "decode_gluon": partial(_decode, "decode_gluon", paged=False, appended=0),
    "decode_gluon paged": partial(_decode, "decode_gluon", paged=True, appended=0),
    "decode_gluon, unequal": partial(_unequal, "decode_gluon", paged=False),
    "decode_gluon paged, unequal": partial(_unequal, "decode_gluon", paged=True),
    "split_triton, unequal": partial(_unequal, "split_triton", paged=False),
    "split_triton": partial(_decode, "split_triton", paged=False, appended=0),
    "split_triton paged": partial(_decode, "split_triton", paged=True, appended=0),
    "split_triton appending": partial(_decode, "split_triton", paged=False, appended=1),
    "append_triton": partial(_decode, "split_triton", paged=False, appended=20),
    "append_triton paged": partial(_decode, "split_triton", paged=True, appended=20),
    "bwd_triton": partial(_gradients, "bwd_triton", 200, 333),
    "bwd_short_triton": partial(_gradients, "bwd_short_triton", 200, 333),
    "bwd_fused_gluon_sm90": partial(_gradients, "bwd_fused_gluon_sm90", 300, 333),
    "bwd_fused_gluon_sm90, 96 columns": partial(_gradients, "bwd_fused_gluon_sm90", 300, 333, 96, 96),
    "bwd_fused_gluon_sm90, 128 columns": partial(_gradients, "bwd_fused_gluon_sm90", 300, 333, 128, 128),
    "bwd_fused_gluon_sm90, packed": partial(_packed_gradients, "bwd_fused_gluon_sm90"),
    "bwd_fused_gluon_sm90, packed, a window": partial(_packed_gradients, "bwd_fused_gluon_sm90", left=70),
    "bwd_gluon_sm90": partial(_gradients, "bwd_gluon_sm90", 300, 333, 128, 128),
    "bwd_gluon_sm90, 192 columns": partial(_gradients, "bwd_gluon_sm90", 200, 333, 192, 128),
    "bwd_gluon_sm90, 256 columns": partial(_gradients, "bwd_gluon_sm90", 200, 333, 256, 256),
    "bwd_gluon_sm90, packed": partial(_packed_gradients, "bwd_gluon_sm90"),
    "bwd_gluon_sm90, packed, a window": partial(_packed_gradients, "bwd_gluon_sm90", left=70),
    "moe_bwd_triton": partial(_moe_gradients, "moe_bwd_triton", 300, 5, 72, 40),
    "moe_bwd_gluon_sm90": partial(_moe_gradients, "moe_bwd_gluon_sm90", 300, 3, 328, 136),
    "moe_grouped_gluon_sm90, adapters": partial(_adapted_gradients, 300, 3, 328, 136, 16),
    "moe_gemv_gluon, mxfp4": partial(_moe_in_format, "moe_gemv_gluon", "mxfp4", 5, 3, 96, 64),
    "moe_gemv_gluon, fp8": partial(_moe_in_format, "moe_gemv_gluon", "fp8_block_w8a8", 5, 3, 272, 144),
    "moe_mxfp4_gluon_sm90": partial(_moe_in_format, "moe_mxfp4_gluon_sm90", "mxfp4", 200, 3, 288, 160),
    "moe_weights_gluon_sm90": partial(_moe_in_format, "moe_weights_gluon_sm90", "int4_g32", 200, 3, 288, 160),
    "moe_fp8_gluon_sm90": partial(_moe_in_format, "moe_fp8_gluon_sm90", "fp8_block_w8a8", 200, 3, 272, 144),
    "moe_grouped_triton, int4": partial(_moe_in_format, "moe_grouped_triton", "int4_g32", 200, 3, 288, 160),
}


def call_once(name: str) -> None:
    """Compare one call on the GPU with the CPU's; ends the process with 3 where it is wrong."""
    torch.manual_seed(0)
    _apart()
    call = CALLS[name]()
    found = call("cuda")
    torch.cuda.synchronize()
    worst = 0.0
    for gpu, right in zip(found, call("cpu"), strict=True):
        square, wrong = right.double().square().mean(), (gpu.cpu().double() - right.double()).square().mean()
        worst = max(worst, (wrong / square).sqrt().item())
    print(f"relative error {worst:.1e}")
    if not worst < _MOST_ERROR:
        sys.exit(3)


# The tool --------------------------------------------------------------------------------------------------------------------


def looked_at(name: str, check: str | None, tool: str, most_s: float) -> dict[str, Any]:
    """The call in a process of its own, under the tool where ``check`` is one of its checks."""
    own = [sys.executable, __file__, "--call", name]
    around = [] if check is None else [tool, "--tool", check, "--target-processes", "application-only"]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run([*around, *own], env=env, capture_output=True, text=True, timeout=most_s, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        text, code = f"stopped after {most_s:g} s", -1
    row = {"kernel": name, "check": check or "none", "seconds": round(time.monotonic() - began, 1)}
    summary = _SUMMARY.search(text)
    if check is not None and summary is not None:
        words = summary[2]
    else:
        last = [line for line in text.splitlines() if line.strip()]
        words = last[-1][:200] if last else "nothing was printed"
    found = [line for line in text.splitlines() if line.startswith("=========") and "SUMMARY" not in line]
    return row | {"result": words, "exit": code, "found": found[:40]}


def is_clean(row: dict[str, Any]) -> bool:
    return row["exit"] == 0 and _CLEAN.search(row["result"]) is not None


def measure(names: Sequence[str], jobs: int, most_s: float) -> list[dict[str, Any]]:
    tool = shutil.which("compute-sanitizer") or next(iter(glob(_PLACES)), "compute-sanitizer")
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for checks in ((None,), CHECKS):  # without the tool first: what is wrong by itself is not looked at
            right = [row["kernel"] for row in rows if row["exit"] == 0] if rows else names
            made = [pool.submit(looked_at, name, check, tool, most_s) for name in right for check in checks]
            for one in made:
                row = one.result()
                rows.append(row)
                print(f"{row['kernel']} {row['check']}: {row['result']} ({row['seconds']} s)", flush=True)
                for line in () if is_clean(row) else row["found"][1:7]:
                    print(f"    {line[:160]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of which a call's name has")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--most-s", type=float, default=50.0)
    arguments = parser.parse_args()
    if arguments.call:
        call_once(arguments.call)
        return
    names = [name for name in CALLS if any(word in name for word in arguments.only)]
    rows = measure(names, arguments.jobs, arguments.most_s)
    if arguments.out is not None:
        from record import write_record

        write_record(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
