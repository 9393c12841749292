"""Runs that are killed with SIGKILL at every row, before, inside and after its writing, and then gone on with.

A program of its own, because it forks before PyTorch has threads: ``killed_runs.py FOLDER``. It leaves one run file for each
place of a kill, and ``uncut.jsonl``; the test reads them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.fx.experimental.symbolic_shapes  # PyTorch imports it late: once here, not in each process
from flashmoe_science.dispatch.registry import kernel_named
from flashmoe_science.measure.session import Options, Session
from flashmoe_science.measure.timing import Sampler

from flashmoe_science.cli.resume import open_run
from flashmoe_science.measure import resume, round, session
from flashmoe_science.measure.bench import Bench
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Environment, Row
from flashmoe_science.store import RunWriter, read_run

WHERE = ("before", "inside", "after")
ENVIRONMENT = Environment(gpu=None, cpu="c", cpu_count=1, platform="p", python="3", torch="2", triton=None)
OPTIONS = Options(
    suite="custom",
    problems=tuple(parse_problem(f"attn b1 h1 q{rows} d8 fp32") for rows in (4, 8)),
    subjects=(kernel_named("sdpa"),),
    rivals=(kernel_named("sdpa_math"),),
    command=("flashmoe", "prove"),
    quick=True,
)
Kill = tuple[int, str]  # at which row that is appended, and where


class Deadly:
    """Writes rows until one is its process's last."""

    def __init__(self, writer: RunWriter, kill: Kill | None) -> None:
        self.writer, self.kill, self.rows = writer, kill, count()

    def append(self, row: Row) -> None:
        where = self.kill[1] if self.kill is not None and next(self.rows) == self.kill[0] else None
        if where == "inside":
            os.write(self.writer._file.fileno(), row.model_dump_json().encode()[:37])
        if where in ("before", "inside"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.writer.append(row)
        if where == "after":
            os.kill(os.getpid(), signal.SIGKILL)


def played(bench: object, call: Callable[[object], object], inputs: object) -> Sampler:
    ticks = count()
    return Sampler("eager", 1, lambda: 100_000.0 + 100.0 * (next(ticks) % 3))


def run(path: Path, kill: Kill | None) -> int:
    """In a process of its own: begin the run, or go on with it. Returns how the process ended, as os.waitpid says it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        writer, earlier = open_run(path)
        Session(Bench(torch.device("cpu"), None), Deadly(writer, kill), OPTIONS, lambda step: None, earlier).run()
        code = 0
    finally:
        os._exit(code)


def main(folder: Path) -> None:
    round.eager_sampler = played
    for module in (session, resume):
        module.environment = lambda bench: ENVIRONMENT
        module.commit, module.source_digest = (lambda: "c"), (lambda: "d")
    assert run(folder / "uncut.jsonl", None) == 0
    rows = len(read_run(folder / "uncut.jsonl").rows) + 1
    # Before a row is after the one before it, but for the first.
    cases: list[list[Kill]] = [[(0, "before")], *([(row, where)] for row in range(rows) for where in ("inside", "after"))]
    chance = random.Random(7)
    cases += [[(chance.randrange(rows), chance.choice(WHERE)) for _ in range(3)] for _ in range(8)]  # killed again and again
    for kills in cases:
        path = folder / f"{'-'.join(f'{row}{where}' for row, where in kills)}.jsonl"
        for kill in kills:
            assert run(path, kill) in (0, signal.SIGKILL), kills  # a resumed run may have fewer rows than the kill asks for
        assert run(path, None) == 0, kills


if __name__ == "__main__":
    main(Path(sys.argv[1]))
