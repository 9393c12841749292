"""The profiler itself, on a GPU: what a call launches, and that work elsewhere is seen to have strayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.inputs import Case, make
from flashmoe_science.measure.launches.trace import profile, profiler_works
from flashmoe_science.measure.promises import broken_launches
from flashmoe_science.operations import kernel_named, operation, parse_problem
from flashmoe_science.records import SeenLaunch

pytestmark = pytest.mark.gpu


def launches(call) -> list[SeenLaunch]:
    bench = bench_here()
    assert profiler_works(bench.device, bench.synchronize) is None
    call()
    time.sleep(0.05)  # what it put off is done before the profiler looks
    (seen,) = profile([call], bench.synchronize)
    return seen


def test_a_call_made_under_another_stream_is_at_home_there() -> None:
    tensor, stream = torch.ones(1 << 16, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (launch,) = launches(lambda: tensor + 1)
    assert launch.strayed is None


def on_a_side_stream(work: Callable[[], object]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        work()


def on_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def deferred_work(work: Callable[[], object]) -> None:
    threading.Timer(0.012, work).start()


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        (on_a_side_stream, "on stream "),
        (on_a_thread, "from another thread"),
        (deferred_work, "from another thread and after its call had been waited for"),
    ],
)
def test_work_elsewhere_is_seen(elsewhere: Callable[[Callable[[], object]], None], words: str) -> None:
    tensor = torch.ones(1 << 16, device="cuda")
    (launch,) = launches(lambda: elsewhere(lambda: tensor.mul_(2)))
    assert str(launch.strayed).startswith(words)


@pytest.mark.parametrize("name", ["fwd_triton", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math"])
def test_kernels_keep_their_promises_and_do_not_stray(name: str) -> None:
    bench, problem, kernel = bench_here(), parse_problem("attn b2 h4 q256 d64 bf16"), kernel_named(name)
    assert bench.gpu is not None
    config = kernel.configs(problem, bench.gpu)[0]
    contract = operation(problem.op).contract()
    inputs = contract.for_kernel(problem, make(contract, problem, bench.device, Case(1)))
    call = contract.planned(kernel, config, inputs)
    seen = launches(lambda: call(inputs))
    promised = kernel.launches(problem, config, bench.gpu)
    assert broken_launches(promised, [seen], kernel.origin, contract.families) == []
    assert {one.strayed for one in seen} == {None}
