"""Time a decoder of random weights end to end, attention or experts by ours and by others: tokens per second.

    python tools/end_to_end.py --out FILE [--context 8192] [--batches 1 16 64] [--size 8b|qwen3-30b|tiny|tiny-moe]

The decoder has the shape of Llama 3 8B (32 layers of 4096, 32 heads over 8 of keys, head dimension 128, MLP 14336, vocabulary
128256) or of Qwen3-30B-A3B (48 layers of 2048, 8 of 128 experts of 768 a token) in bf16, and is plain PyTorch. Of the first
attention differs: ours, SDPA, FlashAttention-3. Of the second what comes after the router's product: our router and experts,
our experts after PyTorch's top-k, as transformers calls them, and PyTorch's grouped and batched products, which transformers
runs by default; attention is ours. All else is the same code.

Prefill is one sequence of the context's length, eager. A decode step is one token a sequence after that many in a contiguous
cache, once captured in a CUDA graph and once eager; it is the same step again and again, so that the length does not drift.
The logits of each implementation are first compared with those of the first of PyTorch's. A mixture's differ by more: a
rounding may flip which expert is the last. Samples alternate between implementations, forth and back. On the CPU the tiny sizes
show that the script works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from decoder import SIZES, Decoder, Experts, Size
from record import write_record

import flashmoe_science as fms
from flashmoe_science.ops.moe.call import Tensors
from flashmoe_science.ops.moe.peers.pytorch import batched_mm, grouped_mm
from flashmoe_science.ops.moe.peers.routers import by_pytorch

Tensor = torch.Tensor


# Attention -------------------------------------------------------------------------------------------------------------------


class Attention(Protocol):
    """What differs. Tensors are [batch, length, heads, head_dim]."""

    name: str

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int) -> Tensor:
        """One new token, appended to the caches behind ``lengths`` (all ``length``), attends to all."""


def _first(result: Any) -> Tensor:
    """The output alone, where the log-sum-exp may come with it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


class Ours:
    name = "fms"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _first(fms.flash_attn_func(q, k, v, causal=True))

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int) -> Tensor:
        return _first(fms.flash_attn_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths, causal=True))


class FlashAttention3:
    name = "fa3"

    def __init__(self) -> None:
        import fa3_fwd_interface

        self.library = fa3_fwd_interface

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _first(self.library.flash_attn_func(q, k, v, causal=True))

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int) -> Tensor:
        return _first(self.library.flash_attn_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths, causal=True))


class Sdpa:
    """PyTorch's. ``grouped``: a step's queries of a key head are given as its rows, as transformers does."""

    def __init__(self, grouped: bool) -> None:
        self.grouped = grouped
        self.name = "sdpa-grouped" if grouped else "sdpa"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int) -> Tensor:
        keys[:, length], values[:, length] = k[:, 0], v[:, 0]
        keys, values = (one[:, : length + 1].transpose(1, 2) for one in (keys, values))
        if self.grouped:
            rows = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(rows, keys, values).reshape(q.shape)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)


# Experts ---------------------------------------------------------------------------------------------------------------------

_Call = Callable[..., Tensor]


def _ours(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, top_k: int) -> Tensor:
    return fms.fused_moe(x, w1, w2, *fms.route(logits, top_k, normalize="sum"))


def _after_top_k(experts: _Call, x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, top_k: int) -> Tensor:
    return experts(x, w1, w2, *by_pytorch(logits, top_k))


@dataclass(frozen=True)
class Way:
    """One implementation of what differs."""

    name: str
    attention: Attention
    experts: Experts | None = None


def ways(size: Size, device: str) -> tuple[list[Way], dict[str, str]]:
    """Those that can run, the reference first; and the reasons why others cannot."""
    if size.experts:
        after: dict[str, Callable[..., Tensor]] = {
            "grouped_mm": lambda *tensors: grouped_mm(Tensors(*tensors)),
            "fms-experts": fms.fused_moe,
            "batched_mm": lambda *tensors: batched_mm(Tensors(*tensors)),
        }
        found = [Way(name, Ours(), partial(_after_top_k, experts)) for name, experts in after.items()]
        return [*found, Way("fms", Ours(), _ours)], {}
    attentions: list[Attention] = [Sdpa(False), Sdpa(True), Ours()]
    absent = {}
    try:
        if device != "cuda":
            raise ImportError("it needs a GPU")
        attentions.append(FlashAttention3())
    except ImportError as error:
        absent["fa3"] = str(error)
    return [Way(one.name, one) for one in attentions], absent


# Work ------------------------------------------------------------------------------------------------------------------------


class Work(Protocol):
    """One thing to time, and how many tokens it makes."""

    tokens: int

    def __call__(self, way: Way) -> Tensor: ...


class Prefill:
    def __init__(self, model: Decoder, context: int, device: str) -> None:
        self.model, self.tokens = model, context
        self.input = torch.randint(model.size.vocabulary, (1, context), device=device)

    def __call__(self, way: Way) -> Tensor:
        rotation = self.model.rotation[None, : self.tokens]
        return self.model.forward(self.input, lambda _, q, k, v: way.attention.prefill(q, k, v), way.experts, rotation)


class Step:
    """A token a sequence behind ``context`` in caches of random keys and values."""

    def __init__(self, model: Decoder, batch: int, context: int, device: str, dtype: torch.dtype) -> None:
        self.model, self.tokens, self.context, size = model, batch, context, model.size
        self.input = torch.randint(size.vocabulary, (batch, 1), device=device)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        shape = (size.layers, batch, context + 64, size.heads_kv, size.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))

    def __call__(self, way: Way) -> Tensor:
        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return way.attention.step(q, k, v, self.keys[index], self.values[index], self.lengths, self.context)

        return self.model.forward(self.input, attend, way.experts, self.model.rotation[None, self.context : self.context + 1])


def cache_bytes(size: Size, batch: int, context: int, itemsize: int) -> int:
    return 2 * size.layers * batch * (context + 64) * size.heads_kv * size.head_dim * itemsize


# Timing ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """``seconds`` is the median of ``samples``, each the seconds of a call; ``error`` the RMS of the logits' difference from
    the first way's, relative to those."""

    work: str
    batch: int
    context: int
    how: str
    way: str
    seconds: float | None = None
    samples: list[float] | None = None
    tokens_per_second: float | None = None
    error: float | None = None
    failed: str | None = None


def captured(call: Callable[[], Tensor]) -> Callable[[], object]:
    """The call as a CUDA graph's replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall time of one call with the GPU idle before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed(work: Work, name: str, how: str, batch: int, context: int, found: list[Way], samples: int) -> list[Row]:
    """A row a way; one that fails says why, and the others go on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [Row(name, batch, context, how, way.name) for way in found]
    calls: dict[str, Callable[[], object]] = {}
    reference: Tensor | None = None
    for row, way in zip(rows, found, strict=True):
        try:
            logits = work(way).double()
            reference = logits if way is found[0] else reference
            if reference is not None:
                row.error = ((logits - reference).square().mean() / reference.square().mean()).sqrt().item()
            call = partial(work, way)
            calls[way.name] = captured(call) if how == "graph" else call
            seconds(calls[way.name], device)
        except Exception as error:
            row.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            calls.pop(way.name, None)
    sampled: dict[str, list[float]] = {one: [] for one in calls}
    for sample in range(samples):
        for one in calls if sample % 2 == 0 else reversed(calls):
            sampled[one].append(seconds(calls[one], device))
    for row in rows:
        if sampled.get(row.way):
            row.samples = [round(one, 9) for one in sampled[row.way]]
            row.seconds = statistics.median(sampled[row.way])
            row.tokens_per_second = work.tokens / row.seconds
    return rows


def shown(rows: list[Row], first: str) -> str:
    titles = f"{'work':8} {'batch':>5} {'context':>7} {'how':6} {'by':13} {'ms':>9} {'tokens/s':>10} {'error':>8}"
    lines = [f"{titles}  against {first}"]
    by_work = {(row.work, row.batch, row.how): row for row in rows if row.way == first}
    for row in rows:
        head = f"{row.work:8} {row.batch:5} {row.context:7} {row.how:6} {row.way:13}"
        base = by_work.get((row.work, row.batch, row.how))
        if row.seconds is None:
            lines.append(f"{head} {row.failed}")
            continue
        ratio = f"{base.seconds / row.seconds:.3f}x" if base is not None and base.seconds else ""
        error = "" if row.error is None else f"{row.error:.1e}"
        lines.append(f"{head} {row.seconds * 1e3:9.3f} {row.tokens_per_second:10.1f} {error:>8}  {ratio}")
    return "\n".join(lines)


@torch.inference_mode()
def measure(size: Size, context: int, batches: list[int], device: str, samples: int, found: list[Way]) -> list[Row]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Decoder(size, device, dtype, context + 64)
    in_prefill = [way for way in found if way.name != "batched_mm"]  # it copies an expert's weights for every pair
    rows = timed(Prefill(model, context, device), "prefill", "eager", 1, context, in_prefill, max(2, samples // 4))
    for batch in batches:
        if device == "cuda" and cache_bytes(size, batch, context, dtype.itemsize) > 0.9 * torch.cuda.mem_get_info()[0]:
            rows.append(Row("decode", batch, context, "graph", "all", failed="the cache does not fit the GPU's memory"))
            continue
        step = Step(model, batch, context, device, dtype)
        for how in ("graph", "eager") if device == "cuda" else ("eager",):
            rows += timed(step, "decode", how, batch, context, found, samples)
        del step
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--size", choices=SIZES, default="8b")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[arguments.size]
    found, absent = ways(size, device)
    rows = measure(size, arguments.context, arguments.batches, device, arguments.samples, found)
    print(shown(rows, found[0].name))
    for name, why in absent.items():
        print(f"{name} was not run: {why}")
    found_here = {
        "size": asdict(size),
        "dtype": "bf16" if device == "cuda" else "fp32",
        "absent": absent,
        "rows": [asdict(row) for row in rows],
    }
    write_record(arguments.out, found_here)


if __name__ == "__main__":
    main()
