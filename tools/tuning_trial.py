"""What ``flashmoe tune`` wins where records are hidden: times of what is chosen without records, tuned, and with records.

    python tools/tuning_trial.py --out FILE [--minutes 9.5] [SUITE ...]

The command runs first, in a process that sees an empty table. Then each problem of the suites is timed with the kernel and
config that dispatch takes without any record, with what was tuned, and with the committed records: the median of replays of a
CUDA graph (Triton's ``do_bench_cudagraph``) whose calls have inputs of their own, up to twice the L2 cache. A choice that is
the same is timed once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from flashmoe_science.cli.tune import DEFAULT
from flashmoe_science.dispatch.peers import faster_peer
from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import Table, committed_table
from flashmoe_science.dispatch.tuned import read_tuned
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.measure.inputs import Case, make
from flashmoe_science.operations import OPERATIONS, kernel_named, operation, parse_problem
from flashmoe_science.problem import Problem

_MAX_SETS = 400
_HIDDEN = """
import sys
from flashmoe_science.dispatch import table
table.committed_table = lambda: table.Table(())
from flashmoe_science.cli.main import main
main(["tune", *sys.argv[1:]])
"""


def decided(problem: Problem, gpu: Gpu, table: Table) -> Decision:
    """What dispatch takes by a table."""
    op = operation(problem.op)
    found = select(problem, gpu, table, op.ours(), op.fallback())
    return faster_peer(found, problem, gpu, table, op.peers())


def timed(problem: Problem, decisions: list[Decision], gpu: Gpu) -> list[float]:
    """The median of each decision in microseconds; the same kernel and config once."""
    contract, found = operation(problem.op).contract(), dict[Any, float]()
    count, device = min(_MAX_SETS, 1 + 2 * gpu.l2_bytes // problem.min_bytes()), torch.device("cuda")
    made = [contract.for_kernel(problem, make(contract, problem, device, Case(seed))) for seed in range(count)]
    sets = [contract.timed_inputs(one) for one in made]
    for one in decisions:
        key = one.kernel, one.config
        if key not in found:
            call = contract.planned(kernel_named(one.kernel, problem.op), one.config, sets[0])
            every = partial(_each, call, sets)
            found[key] = 1000.0 * float(triton.testing.do_bench_cudagraph(every, rep=10, return_mode="median")) / count
    return [found[one.kernel, one.config] for one in decisions]


def _each(call: Callable[[Any], Any], sets: Sequence[Any]) -> None:
    for one in sets:
        call(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    parser.add_argument("--minutes", default="9.5", help="that the command may take")
    parser.add_argument("suites", nargs="*", default=DEFAULT)
    options = parser.parse_args()
    gpu, suites = current_gpu(), {name: texts for op in OPERATIONS for name, texts in op.contract().suites().items()}
    assert gpu is not None, "it needs a GPU"
    with tempfile.TemporaryDirectory() as cache:
        began, words = time.monotonic(), ["--minutes", options.minutes, *options.suites]
        command = [sys.executable, "-c", _HIDDEN, *words]
        code = subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": cache}, check=False).returncode
        minutes = (time.monotonic() - began) / 60.0
        tuned = Table(read_tuned(Path(cache, "flashmoe-science", "tuned", f"{gpu.name}.json")))
    rows: list[dict[str, Any]] = []
    for text in dict.fromkeys(text for name in options.suites for text in suites[name]):
        problem = parse_problem(text)
        decisions = [decided(problem, gpu, table) for table in (Table(()), tuned, committed_table())]
        without, after, records = timed(problem, decisions, gpu)
        torch.cuda.empty_cache()
        chosen = [f"{one.kernel} {one.config}".strip() for one in decisions]
        times = {"without": without, "tuned": after, "records": records}
        rows.append({"problem": text, **times, "chosen": chosen, "measured": tuned.exact(gpu.name, problem) is not None})
    table = np.array([[row["without"], row["tuned"], row["records"]] for row in rows], dtype=float)
    speed = {name: float(np.exp(np.mean(np.log(table[:, 2] / table[:, n])))) for n, name in enumerate(("without", "tuned"))}
    won = (speed["tuned"] - speed["without"]) / (1.0 - speed["without"]) if speed["without"] < 1.0 else 1.0
    measured = sum(row["measured"] for row in rows)
    print(f"tune: exit code {code}, {minutes:.1f} minutes, {measured} of {len(rows)} problems measured")
    print(f"speed, geometric mean, of that with records: without {speed['without']:.3f}, tuned {speed['tuned']:.3f}")
    print(f"of what records win, tuning wins back {won:.0%}")
    for row in sorted(rows, key=lambda row: row["records"] / row["tuned"])[:8]:
        share, choices = row["records"] / row["tuned"], row["chosen"]
        print(f"{share:.2f} of the speed: {row['problem']}: {choices[1]}; by records {choices[2]}")
    from record import write_record

    found = {"minutes": minutes, "suites": [*options.suites], "speed": speed, "won_back": won, "rows": rows}
    write_record(options.out, found)


if __name__ == "__main__":
    main()
