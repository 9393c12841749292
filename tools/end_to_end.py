"""Time a decoder of random weights end to end, attention or experts by ours and by others: tokens per second, and memory.

    python tools/end_to_end.py --out FILE [--size 8b] [--prompt 8192] [--context 8192] [--batches 1 16 64]

The decoder has the shape of Llama 3 8B (32 layers of 4096, 32 heads over 8 of keys, head dimension 128, MLP 14336, vocabulary
128256), of Qwen3-30B-A3B (48 layers of 2048, 8 of 128 experts of 768 a token) or of gpt-oss-20b (tools/decoder.py) in bf16, and
is plain PyTorch. Of the first attention differs: ours, SDPA, FlashAttention-3. Of the second what comes after the router's
product: our router and experts, our experts after PyTorch's top-k, as transformers calls them, and PyTorch's grouped and
batched products, which transformers runs by default; attention is ours. All else is the same code.

Of qwen3-30b-fp8 and gpt-oss-20b "fms" has the experts in fp8 blocks or mxfp4, "fms-w8a8" quantises what they multiply too;
"grouped_mm" (PyTorch's products after our attention), "pytorch" (after its own) and "fms-dense" have them dequantised to bf16,
where memory holds both.

Prefill is one sequence, eager. A decode step is one token a sequence after a context in a contiguous cache, once captured in a
CUDA graph and once eager; it is the same step again and again, so that the length does not drift. The logits of each
implementation are first compared with those of the first of PyTorch's. A mixture's differ by more: a rounding may flip which
expert is the last. Samples alternate between implementations, forth and back. On the CPU the tiny sizes show that the script
works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from decoder import DENSE, IN_FORMAT, SIZES, Decoder, Experts, Layer, Size
from decoder_attention import AtenFlash, Attention, FlashAttention3, Ours, Sdpa
from record import write_record

from flashmoe_science import fused_moe, route
from flashmoe_science.ops.moe.call import SWIGLU, Activation, Tensors
from flashmoe_science.ops.moe.peers.pytorch import batched_mm, grouped_mm
from flashmoe_science.ops.moe.peers.routers import by_pytorch

Tensor = torch.Tensor


# Experts ---------------------------------------------------------------------------------------------------------------------

_Call = Callable[[Tensors, Activation], Tensor]
_OSS = Activation("clamped_silu", interleaved=True)


def _ours(x: Tensor, logits: Tensor, layer: Layer, size: Size, weight_format: str | None = None) -> Tensor:
    weights, ids = route(logits, size.top_k, normalize="sum")
    names = DENSE if weight_format is None else IN_FORMAT
    given: dict[str, Any] = {name: layer[one] for name, one in zip(IN_FORMAT, names, strict=False)}
    if size.window:
        given |= {"gate_up_bias": layer["up_bias"], "down_bias": layer["down_bias"]}
        given |= {"activation": "clamped_silu", "interleaved": True}
    return fused_moe(x, top_k_weights=weights, top_k_ids=ids, weight_format=weight_format, **given)


def _after_top_k(experts: _Call, x: Tensor, logits: Tensor, layer: Layer, size: Size) -> Tensor:
    bias = layer.get("up_bias"), layer.get("down_bias")
    tensors = Tensors(x, layer["up"], layer["down"], *by_pytorch(logits, size.top_k), *bias)
    return experts(tensors, _OSS if size.window else SWIGLU)


@dataclass(frozen=True)
class Way:
    """One implementation of what differs."""

    name: str
    attention: Attention
    experts: Experts | None = None
    unread: tuple[str, ...] = IN_FORMAT  # of a layer's weights


def ways_of_format(size: Size, device: str) -> tuple[list[Way], dict[str, str]]:
    """Those whose experts are in the format of the size, and those whose are the same dequantised."""
    form, grouped, absent = size.weight_format, partial(_after_top_k, grouped_mm), {}
    found = [Way("fms", Ours(), partial(_ours, weight_format=form), DENSE)]
    if form == "fp8_block":
        found.append(Way("fms-w8a8", Ours(), partial(_ours, weight_format="fp8_block_w8a8"), DENSE))
    dense = [Way("grouped_mm", Ours(), grouped), Way("fms-dense", Ours(), _ours)]
    if size.window and device != "cuda":
        absent["pytorch"] = "it needs a GPU"
    else:
        dense.append(Way("pytorch", AtenFlash() if size.window else Sdpa(True), grouped))
    # A weight of the experts: two bytes, at most one in the format, and one for all else.
    needed = (2 + 1 + 1) * size.layers * size.experts * 3 * size.width * size.inner
    if device == "cuda" and needed > torch.cuda.mem_get_info()[1]:
        why = f"with experts of both kinds it may need {needed / 2**30:.0f} GiB"
        return found, {way.name: why for way in dense}
    return dense + found, absent


def ways(size: Size, device: str) -> tuple[list[Way], dict[str, str]]:
    """Those that can run, the reference first; and the reasons why others cannot."""
    if size.weight_format is not None:
        return ways_of_format(size, device)
    if size.experts:
        after: dict[str, _Call] = {
            "grouped_mm": grouped_mm,
            "fms-experts": lambda tensors, _: fused_moe(*tensors[:5]),
            "batched_mm": batched_mm,
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

    model: Decoder
    tokens: int

    def __call__(self, way: Way) -> Tensor: ...


class Prefill:
    def __init__(self, model: Decoder, context: int, device: str) -> None:
        self.model, self.tokens = model, context
        self.input = torch.randint(model.size.vocabulary, (1, context), device=device)

    def __call__(self, way: Way) -> Tensor:
        rotation = self.model.rotation[None, : self.tokens]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return way.attention.prefill(q, k, v, **self.model.of_attention(index))

        return self.model.forward(self.input, attend, way.experts, rotation)


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
            cache, more = (self.keys[index], self.values[index]), self.model.of_attention(index)
            return way.attention.step(q, k, v, *cache, self.lengths, self.context, **more)

        return self.model.forward(self.input, attend, way.experts, self.model.rotation[None, self.context : self.context + 1])


def cache_bytes(size: Size, batch: int, context: int, itemsize: int) -> int:
    return 2 * size.layers * batch * (context + 64) * size.heads_kv * size.head_dim * itemsize


# Timing ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """``seconds`` is the median of ``samples``, each the seconds of a call; ``error`` the RMS of the logits' difference from
    the first way's, relative to those; ``peak_bytes`` the most memory of the first call, other ways' weights left out."""

    work: str
    batch: int
    context: int
    how: str
    way: str
    seconds: float | None = None
    samples: list[float] | None = None
    tokens_per_second: float | None = None
    error: float | None = None
    weight_bytes: int | None = None
    peak_bytes: int | None = None
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


def in_turns(calls: dict[str, Callable[[], object]], samples: int, device: str) -> dict[str, list[float]]:
    """Seconds of so many samples of each call, forth and back."""
    sampled: dict[str, list[float]] = {one: [] for one in calls}
    for sample in range(samples):
        for one in calls if sample % 2 == 0 else reversed(calls):
            sampled[one].append(seconds(calls[one], device))
    return sampled


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def timed(work: Work, name: str, how: str, batch: int, context: int, found: list[Way], samples: int) -> list[Row]:
    """A row a way; one that fails says why, and the others go on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [Row(name, batch, context, how, way.name) for way in found]
    calls: dict[str, Callable[[], object]] = {}
    reference: Tensor | None = None
    for row, way in zip(rows, found, strict=True):
        row.weight_bytes = work.model.weight_bytes(way.unread)
        try:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            logits = work(way).double()
            if device == "cuda":
                row.peak_bytes = torch.cuda.max_memory_allocated() - work.model.weight_bytes() + row.weight_bytes
            reference = logits if way is found[0] else reference
            if reference is not None:
                row.error = ((logits - reference).square().mean() / reference.square().mean()).sqrt().item()
            call = partial(work, way)
            calls[way.name] = captured(call) if how == "graph" else call
            seconds(calls[way.name], device)
        except Exception as error:
            row.failed = in_one_line(error)
            calls.pop(way.name, None)
    sampled = in_turns(calls, samples, device)
    for row in rows:
        if sampled.get(row.way):
            row.samples = [round(one, 9) for one in sampled[row.way]]
            row.seconds = statistics.median(sampled[row.way])
            row.tokens_per_second = work.tokens / row.seconds
    return rows


def shown(rows: list[Row], first: str) -> str:
    titles = f"{'work':8} {'batch':>5} {'context':>7} {'how':6} {'by':13} {'ms':>9} {'tokens/s':>10} {'error':>8} {'GiB':>6}"
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
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}"
        lines.append(f"{head} {row.seconds * 1e3:9.3f} {row.tokens_per_second:10.1f} {error:>8} {peak:>6}  {ratio}")
    return "\n".join(lines)


def seconds_of_process() -> float:
    """Since this process began."""
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]  # since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


@torch.inference_mode()
def measure(
    size: Size, prompt: int, context: int, batches: list[int], device: str, samples: int, found: list[Way]
) -> tuple[list[Row], dict[str, float]]:
    """The rows; and what a user waits for the first token of a prompt by ours, which is called before all others: for imports,
    the GPU and the call. Weights are drawn between them."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.zeros(1, device=device)
    first = {"imports": seconds_of_process()}
    model = Decoder(size, device, dtype, max(prompt, context) + 64, any(way.unread == IN_FORMAT for way in found))
    prefill = Prefill(model, prompt, device)
    first["call"] = seconds(partial(prefill, next(way for way in found if way.name == "fms")), device)
    in_prefill = [way for way in found if way.name != "batched_mm"]  # it copies an expert's weights for every pair
    rows = timed(prefill, "prefill", "eager", 1, prompt, in_prefill, max(2, samples // 4))
    for batch in batches:
        if device == "cuda" and cache_bytes(size, batch, context, dtype.itemsize) > 0.9 * torch.cuda.mem_get_info()[0]:
            rows.append(Row("decode", batch, context, "graph", "all", failed="the cache does not fit the GPU's memory"))
            continue
        step = Step(model, batch, context, device, dtype)
        for how in ("graph", "eager") if device == "cuda" else ("eager",):
            rows += timed(step, "decode", how, batch, context, found, samples)
        del step
    return rows, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, help="tokens of the prefill; by default as --context")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--size", choices=SIZES, default="8b")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[arguments.size]
    found, absent = ways(size, device)
    context, prompt = arguments.context, arguments.prompt or arguments.context
    rows, first = measure(size, prompt, context, arguments.batches, device, arguments.samples, found)
    print(shown(rows, found[0].name))
    print(f"first token: {first['imports']:.2f} s of imports and {first['call']:.2f} s of the call")
    for name, why in absent.items():
        print(f"{name} was not run: {why}")
    found_here = {
        "size": asdict(size),
        "dtype": "bf16" if device == "cuda" else "fp32",
        "absent": absent,
        "first_token_seconds": first,
        "rows": [asdict(row) for row in rows],
    }
    write_record(arguments.out, found_here)


if __name__ == "__main__":
    main()
