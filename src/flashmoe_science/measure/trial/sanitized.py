"""The process that ``compute-sanitizer`` looks at: one call of a candidate, and no other kernel.

``python -m flashmoe_science.measure.trial.sanitized`` with a JSON object as its argument: spec, problem, seed, and ``called``,
a file that is made once the call is over.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

from flashmoe_science.measure.trial.cases import Case, make
from flashmoe_science.measure.trial.host import Host
from flashmoe_science.operations import parse_problem


def main(spec: str, problem: str, seed: int, called: str) -> None:
    """Call the candidate once. Its inputs are made on the CPU and copied: the kernels that would make them are not its own."""
    host, asked = Host(), parse_problem(problem)
    host.open(spec, "")
    host.problem(problem)
    assert host.contract is not None
    made = make(host.contract, asked, torch.device("cpu"), Case(seed))
    call = host.player("", "").bind({name: one.to(host.bench.device) for name, one in made.items()}, "eager")
    call()
    host.bench.synchronize()
    Path(called).touch()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(**json.loads(sys.argv[1]))
