"""Our kernels and the peers on this GPU, on shapes that the suites do not have, and the machinery that needs a device."""

from __future__ import annotations

import pytest
import torch
from flashmoe_science.dispatch.registry import KERNELS, OURS

from flashmoe_science.kernel import Kernel
from flashmoe_science.measure.bench import Candidate, bench_here
from flashmoe_science.measure.callpath import broken_promises, profile, profiler_works
from flashmoe_science.measure.inputs import make_inputs
from flashmoe_science.measure.interpret import default_problems
from flashmoe_science.measure.oracle import examine
from flashmoe_science.measure.session import Options, Session
from flashmoe_science.measure.timing import GRAPH_SAMPLE_NS, graph_sampler
from flashmoe_science.measure.tolerance import attention_reference
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.peers import PEERS
from flashmoe_science.problem import Problem
from flashmoe_science.records import RefusalRow, TimingRow

pytestmark = pytest.mark.gpu

LARGER = tuple(
    parse_problem(text)
    for text in (
        "attn b2 h8 hk2 q799 k1023 d64 bf16 causal",
        "attn b1 h4 q1024 d128 fp16 causal bshd",
        "attn b1 h4 q1023 k1024 d111 bf16",
        "attn b1 h2 q512 d256 bf16 causal",
        "attn b1 h2 q640 k128 d128 fp16 causal",
        "attn b1 h2 q500 d192 dv128 bf16 causal-topleft",
        "attn b1 h4 q777 d64 fp32 causal",
        "attn b2 h33 q2100 d64 fp16 causal",  # 33 tiles of 66 heads: a round in pairs, then one by one
        "attn b1 h36 hk12 q4224 d128 bf16 causal bshd",
        "attn b1 h2 q128 k65536 d64 bf16",  # an error of every step adds up over a thousand of them
    )
)


PEER_PROBLEMS = [
    parse_problem("attn b2 h8 q512 d64 bf16 causal bshd"),
    parse_problem("attn b1 h4 hk2 q300 k700 d128 bf16 causal"),
]
CASES = [(kernel, problem) for kernel in OURS for problem in (*default_problems(quick=False), *LARGER)]
CASES += [(kernel, problem) for kernel in PEERS for problem in PEER_PROBLEMS]


@pytest.mark.parametrize(("kernel", "problem"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_a_kernel_is_right_wherever_it_says_it_serves(kernel: Kernel, problem: Problem) -> None:
    bench = bench_here()
    reason = kernel.absent() or kernel.supports(problem, bench.gpu)
    if reason is not None:
        pytest.skip(reason)
    inputs = make_inputs(problem, bench.device, seed=5, l2_bytes=0).first
    reference = attention_reference(inputs)
    for config in kernel.configs(problem, bench.gpu):
        finding = examine("run", bench, Candidate(kernel, config), inputs, reference)
        assert finding.reasons == (), f"{config}: {finding.reasons}"


@pytest.mark.parametrize("kernel", OURS, ids=lambda kernel: kernel.name)
def test_ours_launch_what_they_promise(kernel: Kernel) -> None:
    bench, problem = bench_here(), parse_problem("attn b2 h4 q300 d64 bf16 causal")
    assert bench.gpu is not None
    if reason := kernel.supports(problem, bench.gpu):
        pytest.skip(reason)
    inputs = make_inputs(problem, bench.device, seed=5, l2_bytes=0).first
    for config in kernel.configs(problem, bench.gpu):
        call = Candidate(kernel, config).planned(inputs)
        call(inputs)
        (seen,) = profile([lambda call=call: call(inputs)], bench.synchronize)
        assert broken_promises(kernel.launches(problem, config, bench.gpu), seen, "ours") == []


def test_the_profiler_tells_calls_apart() -> None:
    bench = bench_here()
    assert profiler_works(bench.device, bench.synchronize) is None
    tensor = torch.ones(4096, device=bench.device)
    seen = profile([lambda: tensor.exp(), lambda: tensor.cumsum(0), lambda: None], bench.synchronize)
    assert [bool(launches) for launches in seen] == [True, True, False]
    assert {launch.name for launch in seen[0]}.isdisjoint({launch.name for launch in seen[1]})


def test_a_graph_sample_is_long_enough_and_close_to_the_events_time() -> None:
    bench, problem = bench_here(), parse_problem("attn b1 h1 q64 d64 fp16")
    inputs = make_inputs(problem, bench.device, seed=5, l2_bytes=0)
    matrix = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)
    sampler = graph_sampler(bench, lambda one: matrix @ matrix, inputs)
    nanoseconds = sampler.sample()
    assert nanoseconds * sampler.calls > 0.5 * GRAPH_SAMPLE_NS
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(50):
        matrix @ matrix
    last.record()
    last.synchronize()
    assert nanoseconds == pytest.approx(first.elapsed_time(last) * 1e6 / 50, rel=0.3)


def test_a_whole_round_gives_rows_on_both_clocks() -> None:
    bench, rows = bench_here(), []

    class Sink:
        def append(self, row: object) -> None:
            rows.append(row)

    problem = parse_problem("attn b2 h8 q512 d64 bf16 causal")
    rivals = tuple(kernel for kernel in KERNELS if kernel.name in ("sdpa", "sdpa_flash"))
    Session(bench, Sink(), Options("custom", (problem,), OURS, rivals, ("x",), quick=True, configs=1), lambda step: None).run()
    timing = [row for row in rows if isinstance(row, TimingRow)]
    assert {row.clock for row in timing} == {"graph", "eager"}
    assert {row.rival for row in timing if row.clock == "graph"} >= {"sdpa", "sdpa_flash"}
    assert [row.reason for row in rows if isinstance(row, RefusalRow)] == []
