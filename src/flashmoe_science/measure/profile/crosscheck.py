"""Our graph clock beside other tools' clocks, like with like: the same call on the same tensors, our samples before and after.

Two tools: ``triton.testing.do_bench_cudagraph``, which replays one set of tensors and so leaves the L2 cache warm, held against
our clock on one set; and NVIDIA's cuda-bench, in a process of its own, held against our clock on as cold or as warm a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from flashmoe_science.dispatch import registry
from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.measure.bench import Bench, Call, Candidate, one_line
from flashmoe_science.measure.inputs import make_inputs
from flashmoe_science.measure.ledger import COULD_NOT_RUN, GOOD, Ledger, Sink
from flashmoe_science.measure.profile import cudabench
from flashmoe_science.measure.session import Progress, begin, end, new_run_id
from flashmoe_science.measure.timing import beside, graph_sampler
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.inputs import AttentionInputs
from flashmoe_science.ops.attention.problem import as_attention
from flashmoe_science.problem import Problem
from flashmoe_science.records import CrossCheckRow

SUITE = "crosscheck"
# From 5 to 90 us on an H200. Longer work on tensor cores meets the board's power limit, and then a tool that rests between its
# calls finds a faster clock than one that does not: docs/notes/clocks-cross-checked.md.
PROBLEMS = (
    "attn b1 h1 q512 d64 fp16",
    "attn b32 h8 q64 d64 fp16",
    "attn b32 h8 q128 d64 fp16",
    "attn b4 h16 q256 d128 bf16",
    "attn b32 h8 q256 d64 fp16",
    "attn b1 h8 q2048 d64 fp16",
    "attn b4 h8 q2048 d64 fp16",
)
TRITON = "triton.testing.do_bench_cudagraph"
_SAMPLES = 50  # of ours on each side of a tool's, some 2 ms each


def problems_of(texts: Sequence[str]) -> tuple[Problem, ...]:
    """The problems given as text, or the seven of every comparison.

    Raises:
        ProblemError: a text that does not parse, or another operation's than attention.
    """
    return tuple(as_attention(parse_problem(text)) for text in texts or PROBLEMS)


class CrossCheck:
    """Problems, each with the kernel named or the library's choice, ready to be compared.

    Raises:
        ValueError: an unknown kernel, or one that cannot serve a problem.
    """

    def __init__(
        self, bench: Bench, problems: Sequence[Problem], kernel: str | None, command: Sequence[str], seed: int = 42
    ) -> None:
        self.bench, self.problems, self.command, self.seed = bench, problems, command, seed
        requested = None if kernel is None else registry.kernel_named(kernel)
        chosen = [select(problem, bench.gpu, committed_table(), registry.OURS, requested) for problem in problems]
        self.candidates = [Candidate(registry.kernel_named(one.kernel), one.config) for one in chosen]

    def run(self, sink: Sink, watch: Callable[[Progress], None]) -> None:
        """Compare; rows go to ``sink`` as they come. A tool that is absent or fails leaves rows that say why."""
        ledger, began = Ledger(new_run_id(), sink), time.monotonic()
        begin(ledger, self.bench, SUITE, self.command, self.seed)
        total, numbers = 3 * len(self.problems), 0  # a comparison with do_bench_cudagraph each, two with cuda-bench
        watch(Progress(0, total, TRITON))
        sampling = time.monotonic()
        for done, row in enumerate(self._rows(ledger.run), 1):
            ledger.add(row)
            numbers += row.time_ns is not None
            watch(Progress(done, total, f"{row.tool}: {row.problem}"))
        ledger.device_seconds = time.monotonic() - sampling
        end(ledger, began, GOOD if numbers else COULD_NOT_RUN)

    def _rows(self, run: str) -> Iterator[CrossCheckRow]:
        both = list(zip(self.problems, self.candidates, strict=True))
        for problem, candidate in both:
            yield self._beside_triton(run, problem, candidate)
        cases = [cudabench.Case(str(problem), one.name, str(one.config)) for problem, one in both]
        for finding in cudabench.measure(cases, self.seed):
            yield CrossCheckRow(run=run, **finding)

    def _beside_triton(self, run: str, problem: Problem, candidate: Candidate) -> CrossCheckRow:
        import triton

        found = CrossCheckRow(
            run=run,
            problem=str(problem),
            kernel=candidate.name,
            config=str(candidate.config),
            cache="warm",
            tool=TRITON,
            tool_version=triton.__version__,
            method="median of its replays of one set of tensors",
            time_ns=None,
        )
        try:
            first = make_inputs(problem, self.bench.device, self.seed, l2_bytes=0)
            call = candidate.planned(first.first)
            sampler = graph_sampler(self.bench, call, first)
            ours, samples = beside(sampler.sample, lambda: triton_samples(call, first.first), _SAMPLES)
        except Exception as error:  # whatever the kernel or the tool raises is the finding
            return found.model_copy(update={"reason": one_line(error)})
        return found.model_copy(update={"time_ns": statistics.median(samples), "samples": samples, "ours": ours})


def triton_samples(call: Call, inputs: AttentionInputs) -> list[int]:
    """What do_bench_cudagraph measures, in nanoseconds; its first replay, which uploads the graph, among them."""
    from triton.testing import do_bench_cudagraph

    milliseconds = do_bench_cudagraph(lambda: call(inputs), return_mode="all")
    return [round(one * 1e6) for one in milliseconds]
