"""All that ``flashmoe prove`` measures, in order: builds where there is no GPU, then a run for each group of problems, or one
of the functions that a user brought. Each run has a file of its own, whose rows are on disk as they come.
"""

from __future__ import annotations

import time
from pathlib import Path

from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.measure.bench import bench_here
from flashmoe_science.measure.function_run import run_functions
from flashmoe_science.measure.kernels_run import KernelsRun
from flashmoe_science.measure.offline import SUITE, OfflineRun, kernels_to_build
from flashmoe_science.measure.request import Request, groups, subjects_and_rivals
from flashmoe_science.measure.session import NOTHING_EARLIER, Earlier, Outcome, Session, Watch
from flashmoe_science.store import RunWriter


class Plan:
    """A request made definite. Making it raises ValueError, in one line, for whatever cannot be done."""

    writes = True  # this process has the records

    def __init__(self, request: Request) -> None:
        self.request, self.bench = request, bench_here()
        self.groups = groups(request, self.bench.gpu)
        self.problems = tuple(dict.fromkeys(problem for group in self.groups for problem in group.problems)) or None
        builds = self.bench.gpu is None and not request.functions
        ops = {group.op for group in self.groups}
        self.to_build = tuple(one for one in kernels_to_build(request.kernel) if one.op in ops) if builds else ()
        # Without a GPU kernels of ours that are named are built, and there is nothing of them to time.
        built = {one.name for one in self.to_build} if request.kernel else set()
        self.timed = () if request.functions or (built and built >= set(request.kernel)) else self.groups
        for group in self.timed:
            subjects_and_rivals(request, group, self.bench.gpu)
        self.found: list[str] = []  # what a run without a GPU found, in words

    def run(self, folder: Path, watch: Watch, earlier: Earlier = NOTHING_EARLIER) -> list[Outcome]:
        """Every stage in order until one fails, without those that ``earlier`` finished. Raises StoreError."""
        began, outcomes = time.monotonic(), list[Outcome]()
        if self.request.functions:
            if self.problems and not any(earlier.remaining(spec, self.problems) for spec in self.request.functions):
                return []
            with RunWriter(_free(folder, "functions")) as writer:
                suite = self.groups[0].name if len(self.groups) == 1 else "custom"
                session = Session(self.bench, writer, self.request, watch, earlier, began)
                return [run_functions(session, self.problems, suite)]
        if self.to_build and not earlier.done:
            with RunWriter(_free(folder, SUITE)) as writer:
                named = self.problems if self.request.targets else None
                offline = OfflineRun(Session(self.bench, writer, self.request, watch), self.to_build, named)
                outcomes.append(offline.run())
                self.found += offline.found
                began = time.monotonic()
        for group in (one for one in self.timed if earlier.remaining(None, one.problems)):
            if outcomes and outcomes[-1].exit_code in (ExitCode.WRONG, ExitCode.COULD_NOT_RUN):
                break
            with RunWriter(_free(folder, group.name)) as writer:
                session = Session(self.bench, writer, self.request, watch, earlier, began)
                outcomes.append(KernelsRun(session, group).run())
        return outcomes


def _free(folder: Path, name: str) -> Path:
    """A file of that name that does not exist yet: run-NAME.jsonl, then run-NAME-2.jsonl and so on."""
    path, number = folder / f"run-{name}.jsonl", 2
    while path.exists():
        path, number = folder / f"run-{name}-{number}.jsonl", number + 1
    return path
