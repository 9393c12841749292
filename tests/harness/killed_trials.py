"""A run of a candidate that is killed with SIGKILL in the middle of writing a timing row, and then gone on with.

A program of its own, because it forks before PyTorch has threads: ``killed_trials.py PATH CANDIDATE ROW``, where ROW says
which of the timing rows, from 0 on, is the one in hand.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

import torch
from flashmoe_science.measure.trial import contest
from flashmoe_science.measure.trial.trials import Options, Trials

from flashmoe_science.cli.resume import open_run
from flashmoe_science.measure.bench import Bench
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Row, TimingRow
from flashmoe_science.store import RunWriter

PROBLEMS = tuple(parse_problem(f"attn b1 h1 q{rows} d8 fp32") for rows in (4, 8))


class Deadly:
    """Writes rows until one is its process's last."""

    def __init__(self, writer: RunWriter, last: int | None) -> None:
        self.writer, self.last, self.timed = writer, last, count()

    def append(self, row: Row) -> None:
        if isinstance(row, TimingRow) and next(self.timed) == self.last:
            os.write(self.writer._file.fileno(), row.model_dump_json().encode()[:37])
            os.kill(os.getpid(), signal.SIGKILL)
        self.writer.append(row)


def run(path: Path, spec: str, last: int | None) -> int:
    """In a process of its own: begin the run, or go on with it. Returns how the process ended, as os.waitpid says it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        options = Options(
            suite="custom",
            specs=(spec,),
            problems=PROBLEMS,
            against=("sdpa_math",),
            every=False,
            command=("flashmoe", "prove", spec, "--quick"),
            quick=True,
            seed=42,
            repeats=1,
            watchdog_s=60.0,
            budget_s=None,
        )
        writer, earlier = open_run(path)
        with writer:
            Trials(Bench(torch.device("cpu"), None), Deadly(writer, last), options, lambda step: None, earlier).run()
        code = 0
    finally:
        os._exit(code)


def main(path: Path, spec: str, last: int) -> None:
    # What the machine's other work does to a time is no fault of a kernel's.
    contest.impossible = lambda samples, floor, expected: None
    contest.disagreement = lambda remote, ping: None
    contest.beside_over_alone = lambda beside, alone: None
    assert run(path, spec, last) == signal.SIGKILL
    cut = path.read_bytes()
    assert run(path, spec, None) == 0
    path.with_suffix(".cut").write_bytes(cut)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
