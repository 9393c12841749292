"""Correctness without a GPU: our kernels in Triton's interpreter, held to the same oracle and the same rule.

The interpreter is chosen when a kernel is decorated, so it needs a process of its own: this module, with TRITON_INTERPRET=1
and a JSON object on its standard input, prints one record row a line as it goes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.measure.bench import Bench, Candidate, one_line
from flashmoe_science.measure.child import lines_from
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.problem import Problem
from flashmoe_science.records import ROW, Row

_MODULE = "flashmoe_science.measure.interpret"
MODEL_GPU = "h200"  # whose configs are interpreted: they decide the tiles, not the arithmetic
MOST_SCORES = 2**18  # of a problem that the interpreter can do in seconds

_SHAPES = (
    "attn b1 h1 q4 d4",
    "attn b1 h2 q65 d64 causal",
    "attn b2 h4 hk2 q33 k70 d40 dv24 causal",
    "attn b1 h2 q70 k33 d32 causal",
    "attn b1 h2 q70 k33 d32 causal-topleft",
    "attn b1 h3 hk1 q1 k200 d128",
    "attn b1 h2 q100 k130 d96 bshd",
    "attn b1 h1 q70 d192 causal",
    "attn b2 h1 q1 d1",
    "attn b1 h1 q40 k300 d80",
)
_DTYPES = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Case:
    """One run in the interpreter."""

    kernel: str
    config: str
    problem: str


def default_problems(quick: bool) -> tuple[Problem, ...]:
    """Odd and tiny shapes, every mask, grouped heads, rows that see no key, each in every dtype (`quick`: in one, in turn)."""
    every = [[parse_problem(f"{shape} {dtype}") for dtype in _DTYPES] for shape in _SHAPES]
    if quick:
        return tuple(of_shape[index % len(_DTYPES)] for index, of_shape in enumerate(every))
    return tuple(problem for of_shape in every for problem in of_shape)


def small(problems: Sequence[Problem]) -> list[Problem]:
    """Those that the interpreter can do in seconds."""
    return [one for one in problems if isinstance(one, AttentionProblem) and one.scores() <= MOST_SCORES]


def cases(kernels: Sequence[Kernel], problems: Sequence[Problem]) -> tuple[Case, ...]:
    """Each interpretable kernel on each problem it serves with its first config, and once with each other config."""
    gpu = gpu_named(MODEL_GPU)
    found = []
    for kernel in kernels:
        served = [problem for problem in problems if kernel.interpretable and kernel.supports(problem, gpu) is None]
        tried: set[Config] = set()
        for problem in served:
            first, *others = kernel.configs(problem, gpu)
            new = [config for config in others if config not in tried]
            tried.update((first, *new))
            found += [Case(kernel.name, str(config), str(problem)) for config in (first, *new)]
    return tuple(found)


def interpret(run: str, seed: int, todo: Sequence[Case]) -> Iterator[Row]:
    """Run the cases in an interpreter of their own and yield their rows as they come.

    Raises:
        RuntimeError: the process ended badly; the message is the last thing that it said.
    """
    asked = {"run": run, "seed": seed, "cases": [[case.kernel, case.config, case.problem] for case in todo]}
    for line in lines_from(_MODULE, json.dumps(asked), {"TRITON_INTERPRET": "1"}):
        yield ROW.validate_json(line)


class _Lines:
    """A sink that prints rows for the parent process."""

    def append(self, row: Row) -> None:
        print(row.model_dump_json(), flush=True)


def main(run: str, seed: int, todo: Sequence[Case]) -> None:
    """Run the cases here, where Triton interprets, and print their rows."""
    from flashmoe_science.measure.inputs import make_inputs
    from flashmoe_science.measure.oracle import examine
    from flashmoe_science.measure.tolerance import attention_reference
    from flashmoe_science.operations import kernel_named

    bench = Bench(torch.device("cpu"), None)
    torch.set_num_threads(1)
    ledger = Ledger(run, _Lines())
    for case in todo:
        problem = parse_problem(case.problem)
        candidate = Candidate(kernel_named(case.kernel), Config.parse(case.config))
        inputs = make_inputs(problem, bench.device, seed, l2_bytes=0).first
        try:
            finding = examine(run, bench, candidate, inputs, attention_reference(inputs))
        except Exception as error:  # whatever the interpreter raises is the finding
            ledger.refuse("correctness", f"it does not run in the interpreter: {one_line(error)}", problem, candidate)
            continue
        ledger.add(finding.row)
        if finding.reasons:
            ledger.refuse("correctness", "; ".join(finding.reasons), problem, candidate)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    main(given["run"], given["seed"], [Case(*case) for case in given["cases"]])
