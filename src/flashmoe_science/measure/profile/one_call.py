"""The process that Nsight Compute looks at: one call, with everything before it out of the profiler's sight.

``python -m flashmoe_science.measure.profile.one_call`` with a JSON object as its argument: who, config, problem, seed.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

from flashmoe_science.measure.trial.cases import Case, make
from flashmoe_science.measure.trial.host import Host
from flashmoe_science.operations import parse_problem

_WARM_UP = 3  # calls, so that nothing is compiled, loaded or tuned in the one that counts


def main(who: str, config: str, problem: str, seed: int) -> None:
    """Call ``who`` on the problem. A candidate (module:function or file.py:function) brings its own contract."""
    host, asked = Host(), parse_problem(problem)
    candidate = ":" in who
    host.open(who if candidate else None, "" if candidate else asked.op)
    host.problem(problem)
    assert host.contract is not None
    tensors = make(host.contract, asked, host.bench.device, Case(seed))
    call = host.player("" if candidate else who, config).bind(tensors, "graph")
    for _ in range(_WARM_UP):
        call()
    host.bench.synchronize()
    torch.cuda.profiler.start()
    call()
    host.bench.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(**json.loads(sys.argv[1]))
