"""A run on several ranks, each a process with a GPU of its own, or on the CPU: ``torchrun ... -m flashmoe_science prove``.

Every rank makes the same inputs and takes the same steps; rank 0 writes the rows. A sample begins on all ranks at once and is
the time of the slowest. The samples of all implementations of a problem alternate. Some elements of each rank's results are
compared with the oracle; the largest difference of our results from one GPU's call is noted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.measure.request import Request, distributed_suites, is_too_much_for_a_cpu
from flashmoe_science.measure.session import Outcome, Session, Watch
from flashmoe_science.measure.world.checks import Checks
from flashmoe_science.measure.world.ranks import World, world_size
from flashmoe_science.measure.world.timing import Timing
from flashmoe_science.operations import OPERATIONS, parse_problem
from flashmoe_science.problem import DistributedProblem, ProblemError
from flashmoe_science.records import Row
from flashmoe_science.store import RunWriter


class WorldPlan:
    """A request made definite, on this rank. Making it raises ValueError, in one line, for whatever cannot be done."""

    def __init__(self, request: Request) -> None:
        self.request, self.found = request, list[str]()
        named = distributed_suites()
        refused = [f"--{word} is given" for word in ("kernel", "against", "draw", "shard") if getattr(request, word)]
        refused += [f"{word} is named" for word in request.functions]
        if refused:
            raise ValueError(f"{refused[0]}, which is not for several ranks")
        words = request.targets or tuple(named)
        self.groups = {word: tuple(_distributed(text) for text in named[word]) for word in words if word in named}
        if custom := tuple(_distributed(word) for word in words if word not in named):
            self.groups["custom"] = custom
        for one in (one for problems in self.groups.values() for one in problems):
            if current_gpu() is None and is_too_much_for_a_cpu(one):
                raise ValueError(f"{one} is too much for a CPU, and there is no GPU here")
        self.world = World()
        self.writes = self.world.rank == 0

    def run(self, folder: Path, watch: Watch) -> list[Outcome]:
        """A run for each suite, in a file of its own. Raises StoreError."""
        began, outcomes = time.monotonic(), list[Outcome]()
        for name, problems in self.groups.items():
            with RunWriter(folder / f"run-{name}.jsonl") if self.world.rank == 0 else nullcontext(list[Row]()) as sink:
                session = Session(self.world.bench, sink, self.request, watch, began=began)
                outcomes.append(_run(self.world, session, name, problems))
        self.world.end()
        return outcomes


def _distributed(text: str) -> DistributedProblem:
    """The problem on the ranks that torchrun started. Raises ValueError: the text says another number of ranks, or is of an
    operation that is not measured on several."""
    problem, ranks = parse_problem(text), world_size()
    if not isinstance(problem, DistributedProblem):
        parallelism = next((one.parallelism for one in OPERATIONS if one.name == problem.op), "")
        if not parallelism:
            raise ValueError(f"'{problem}' is not measured on several ranks")
        problem = DistributedProblem(problem, parallelism, ranks)
    if problem.ranks != ranks:
        raise ProblemError(f"'{problem}' is of {problem.ranks} ranks; torchrun started {ranks}")
    return problem


def _run(world: World, session: Session, name: str, problems: Sequence[DistributedProblem]) -> Outcome:
    session.begin(name, world.size, world.cards)
    session.total, failed = len(problems), list[str]()
    for problem in problems:
        session.show_progress(str(problem))
        if any(world.gather(time.monotonic() > session.deadline)):
            break
        try:
            with torch.no_grad():
                Timing(world, session, problem).time(Checks(world, session, problem).ready())
        except ValueError as error:  # the same on all ranks: it is of the problem
            session.unusable(str(error), problem)
            failed.append(f"{problem} cannot be measured: {error}")
        session.finish(problem)
        gc.collect()
        if world.bench.gpu is not None:
            torch.cuda.empty_cache()
    return session.end("; ".join(failed) or None, session.total - session.done)
