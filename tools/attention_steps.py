"""Time forward and backward of attention through autograd, ours and PyTorch's: on the device, and as a caller waits.

    python tools/attention_steps.py --out FILE [PROBLEM ...]

Problems are those of the suite train-short, or given as text, "attnbwd b1 h16 q128 d64 bf16 causal bshd". A step is
``scaled_dot_product_attention`` of leaves and ``torch.autograd.grad`` of its output by a given gradient. On the device: many
steps in one CUDA graph; as a caller waits: many one after the other, with a synchronisation at the end. Samples of ours and of
PyTorch's are taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import write_record

import flashmoe_science as fms
from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.measure.clocks import FEW, FEW_CPU, CannotTime, Sampler, eager_sampler, graph_sampler, paired
from flashmoe_science.measure.inputs import InputSets, sets_beyond
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.proof.backward.suites import SUITES

Leaves = tuple[torch.Tensor, ...]
_L2_OF_CPU = 2**20


@dataclass
class Row:
    """Nanoseconds a step on one clock; ``ratio`` is ours by PyTorch's, of medians; ``served``: what ours is served by."""

    problem: str
    clock: str
    ratio: float
    ours: list[int]
    pytorch: list[int]
    served: str


def leaves_of(problem: Any, bench: Bench) -> InputSets[Leaves]:
    """Q, K, V and the gradient of O, heads behind tokens in memory."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[problem.dtype]

    def made(heads: int, seqlen: int, width: int) -> torch.Tensor:
        return torch.randn(problem.batch, seqlen, heads, width, device=bench.device, dtype=dtype).transpose(1, 2)

    def one() -> Leaves:
        q = made(problem.heads, problem.seqlen_q, problem.head_dim)
        k = made(problem.heads_kv, problem.seqlen_k, problem.head_dim)
        v = made(problem.heads_kv, problem.seqlen_k, problem.head_dim_v)
        dout = made(problem.heads, problem.seqlen_q, problem.head_dim_v)
        return (*(leaf.requires_grad_() for leaf in (q, k, v)), dout)

    first = one()
    count = sets_beyond(_L2_OF_CPU if bench.gpu is None else bench.gpu.l2_bytes, sum(leaf.nbytes for leaf in first))
    return InputSets((first, *(one() for _ in range(min(count, 64) - 1))), "cold" if count <= 64 else "warm")


def step(function: Callable[..., torch.Tensor], causal: bool, gqa: bool, leaves: Leaves) -> Leaves:
    q, k, v, dout = leaves
    return torch.autograd.grad(function(q, k, v, is_causal=causal, enable_gqa=gqa), (q, k, v), dout)


def rows_of(text: str, bench: Bench) -> list[Row]:
    problem: Any = parse_problem(text)
    inputs, gqa = leaves_of(problem, bench), problem.heads != problem.heads_kv
    ours, pytorch = (
        partial(step, function, problem.causal, gqa)
        for function in (fms.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    explained = fms.explain(fms.scaled_dot_product_attention, *inputs.sets[0][:3], is_causal=problem.causal, enable_gqa=gqa)
    clocks: list[Callable[..., Sampler]] = [eager_sampler] if bench.gpu is None else [graph_sampler, eager_sampler]
    rows = []
    for clock in clocks:
        try:
            a, b = clock(bench, ours, inputs), clock(bench, pytorch, inputs)
        except CannotTime as error:
            print(f"{text}: {error}")
            continue
        samples = paired(a.sample, b.sample, FEW_CPU if bench.gpu is None else FEW)
        ratio = statistics.median(samples[0]) / statistics.median(samples[1])
        rows.append(Row(text, a.clock, ratio, *samples, f"{explained.kernel}: {explained.reason}"))
        of_each = " ".join(f"{statistics.median(one) / 1e3:9.1f}" for one in samples)
        print(f"{text:46} {a.clock:6} {of_each} us  {ratio:.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=SUITES["train-short"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench = bench_here()
    print(f"{'forward and backward':46} {'clock':6} {'ours':>9} {'PyTorch':>9}     ours by PyTorch's")
    rows: list[Row] = []
    for text in arguments.problems:
        rows += rows_of(text, bench)
        write_record(arguments.out, {"rows": [asdict(row) for row in rows]})  # a run that is cut keeps what it has
    for clock in dict.fromkeys(row.clock for row in rows):
        ratios = [row.ratio for row in rows if row.clock == clock]
        print(f"{clock}: geometric mean {statistics.geometric_mean(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
