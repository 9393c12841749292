"""Honest kernels before the judge: ``python -m tests.harness.honest 10000`` prints how many whole runs condemn one.

A run is what ``flashmoe prove`` asks of a function on one problem: the whole exam, and outputs of timed calls, which have other
seeds and scales. Kernel, problem and seed are drawn at random, from one element to thousands, in every dtype. It draws on the
CPU, some 20 runs a second and core; nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import lru_cache
from multiprocessing import get_context
from random import Random
from typing import Any

import torch
from tests.harness.honest_kernels import ATTENTION, EXPERTS, EXPERTS_IN_FORMATS, MERGES

from flashmoe_science.contract import Contract, built_in
from flashmoe_science.measure import oracle
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.channel import Failed, InProcess
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.inputs import Case, Memory, Tensors, make
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.worker import calls
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.problem import Problem
from flashmoe_science.processes import processors

LOOKS = 24  # outputs of timed calls that a run looks at: of a control and three rivals, six each
_CHUNK = 50  # runs of one process at a time
_MAX_SCORES = 2**16


class Judge:
    """One operation's exam, in this process."""

    def __init__(self, op: str) -> None:
        bench, handover = Bench(torch.device("cpu"), None), Memory()
        self._worker, self._contract = Worker(bench, handover, trusted=True), built_in(op)
        self._oracle, self._asked = InProcess(Oracle(handover, bench.device).command), InProcess(self._worker.command)
        self._asked.ask("open", spec=None, contract=op)
        self._oracle.ask("open", contract=op)

    def run(self, fn: Callable[..., Any], problem: str, seed: int) -> list[str]:
        """Why a whole run of ``fn`` condemns it; empty where it does not."""
        self._worker.fn = fn
        self._asked.ask("problem", text=problem)
        assert self._oracle.ask("problem", text=problem)["cannot"] is None
        exam, contract = Exam(self._asked, self._oracle, "", "", seed, on_gpu=False, repeats=2, more_s=0.0), self._contract
        found = exam.full(contract.distributions, contract.variants, deterministic=False).reasons
        for variant in (*contract.sweep_variants, *contract.edge_variants):
            with suppress(Failed):  # it does not serve ids of no expert
                found += exam.one_call(variant=variant).reasons
        chance = Random(seed)
        timed = (Case(seed + 10**6 + look, scale=chance.randint(64, 192) / 128) for look in range(LOOKS))
        return found + [reason for case in timed for reason in exam._call(case).reasons]


def attention(chance: Random) -> str:
    """A problem, from one score to thousands."""
    while True:
        batch, heads_kv, group = chance.choice((1, 1, 2)), chance.choice((1, 1, 2, 3)), chance.choice((1, 1, 2, 4))
        rows, keys = round(2 ** chance.uniform(0, 8)), round(2 ** chance.uniform(0, 8))
        keys = rows if chance.random() < 0.5 else keys
        if batch * heads_kv * group * rows * keys <= _MAX_SCORES:
            break
    width, mask = chance.choice((1, 4, 8, 16, 32, 40, 64, 128, 192, 256)), chance.choice(("", " causal"))
    dtype = chance.choice(("fp32", "fp16", "bf16"))
    return f"attn b{batch} h{heads_kv * group} hk{heads_kv} q{rows} k{keys} d{width} {dtype}{mask}"


def backward(chance: Random) -> str:
    return attention(chance).replace("attn", "attnbwd")


def merges(chance: Random) -> str:
    parts, tokens, heads = (round(2 ** chance.uniform(*log2)) for log2 in ((1, 5), (0, 7), (0, 4)))
    width, dtype = chance.choice((1, 8, 40, 64, 128, 256)), chance.choice(("fp32", "fp16", "bf16"))
    return f"attnmerge p{parts} t{tokens} h{heads} d{width} {dtype}"


def experts(chance: Random) -> str:
    tokens, count = round(2 ** chance.uniform(0, 6)), round(2 ** chance.uniform(0, 4))
    top_k, dim, hidden = chance.randint(1, min(4, count)), chance.choice((8, 16, 64, 100)), chance.choice((8, 24, 64))
    return f"moe t{tokens} e{count} k{top_k} d{dim} f{hidden} {chance.choice(('fp32', 'fp16', 'bf16'))}"


def experts_in_formats(chance: Random) -> str:
    """No w8a8: its scheme is what a kernel that quantises no rows would be held to."""
    tokens, count = round(2 ** chance.uniform(0, 4)), round(2 ** chance.uniform(0, 3))
    form = chance.choice(("mxfp4", "int4_g32", "int4_g128_zero", "fp8_channel", "fp8_block"))
    return f"moe t{tokens} e{count} k{chance.randint(1, min(4, count))} d{chance.choice((128, 256))} f128 bf16 w:{form}"


DRAWS = (  # those in formats take twenty times as long
    *(("attention", ATTENTION, attention), ("moe", EXPERTS, experts)) * 4,
    ("attention_backward", ATTENTION, backward),
    ("attention_merge", MERGES, merges),
    ("moe", EXPERTS_IN_FORMATS, experts_in_formats),
)


def runs(first: int, count: int) -> Iterator[tuple[str, list[str]]]:
    """The draws from ``first`` on: what each was, and why it was condemned."""
    judges = {op: Judge(op) for op, _, _ in DRAWS}
    for number in range(first, first + count):
        chance = Random(number)
        op, kernels, drawn = chance.choice(DRAWS)
        name, problem = chance.choice(sorted(kernels)), drawn(chance)
        yield f"{name} on '{problem}', seed {number}", judges[op].run(kernels[name], problem, number)


@lru_cache(1)
def _made(contract: Contract, problem: Problem, device: torch.device, case: Case) -> Tensors:
    return make(contract, problem, device, case)


def _made_once(contract: Contract, problem: Problem, device: torch.device, case: Case) -> Tensors:
    """The inputs of a case: a copy for the kernel and one for the oracle, which two processes make each for itself."""
    if case.variant:  # whose tensors lie in memory in ways that a copy would not have
        return make(contract, problem, device, case)
    return {name: one.clone() for name, one in _made(contract, problem, device, case).items()}


def condemned(first: int, count: int) -> list[tuple[str, list[str]]]:
    """Those of the draws that were condemned, with the reasons."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    calls.make = oracle.make = _made_once
    calls.Calls._settle = lambda self: 0.0  # type: ignore[method-assign]  # nothing works on after these calls
    return [(what, reasons) for what, reasons in runs(first, count) if reasons]


def main(count: int, first: int = 0) -> int:
    chunks: Iterable[tuple[int, int]] = [(at, min(_CHUNK, first + count - at)) for at in range(first, first + count, _CHUNK)]
    with ProcessPoolExecutor(processors(), get_context("spawn")) as pool:
        found = [one for some in pool.map(condemned, *zip(*chunks, strict=True)) for one in some]
    for what, reasons in found:
        print(f"{what}: {'; '.join(reasons)}")
    print(f"{len(found)} of {count} whole runs of honest kernels are condemned")
    return int(len(found) > 3 * count / 10_000)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
