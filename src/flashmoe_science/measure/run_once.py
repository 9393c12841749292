"""A process for another tool to look at: one call of a kernel, with everything before it out of the tool's sight.

``python -m flashmoe_science.measure.run_once`` with a JSON object as its argument: the arguments of ``main``.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.inputs import Case, Memory, make
from flashmoe_science.measure.worker.worker import Worker
from flashmoe_science.operations import parse_problem
from flashmoe_science.processes import end_with_parent

MODULE = "flashmoe_science.measure.run_once"
_WARM_UP = 3  # calls, so that nothing is compiled, loaded or tuned in the one that is profiled


def main(who: str, config: str, problem: str, seed: int) -> None:
    """Call a kernel of the package, or the function module:function, on a problem: a few times, then once marked for a
    profiler (Nsight Compute)."""
    worker, asked = Worker(bench_here(), Memory(), trusted=True), parse_problem(problem)
    is_function = ":" in who
    worker.open(who if is_function else None, "" if is_function else asked.op)
    worker.problem(problem)
    assert worker.contract is not None
    made = make(worker.contract, asked, worker.bench.device, Case(seed))
    call = worker.caller("" if is_function else who, config).bind(made, "graph")
    for _ in range(_WARM_UP):
        call()
    worker.bench.synchronize()
    torch.cuda.profiler.start()
    call()
    worker.bench.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_with_parent()  # the tool around it
    main(**json.loads(sys.argv[1]))
