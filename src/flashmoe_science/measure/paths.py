"""The call paths of a run, seen by a profiler in a process of its own.

A profiler that has once been attached slows every later launch of its process (CUPTI is not detached when a session ends), so
the process that times must never have profiled. This module, given problems and candidates as JSON on its standard input,
profiles one call of each and prints what it launched, one JSON object a line. Nothing else runs on the GPU meanwhile.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel

from flashmoe_science.kernel import Config
from flashmoe_science.measure.bench import Bench, Candidate, bench_here
from flashmoe_science.measure.callpath import profile, profiler_works
from flashmoe_science.measure.child import lines_from
from flashmoe_science.measure.clusters import with_clusters
from flashmoe_science.measure.eager import user_call
from flashmoe_science.measure.inputs import make_inputs
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import SeenLaunch

_MODULE = "flashmoe_science.measure.paths"


class Seen(BaseModel):
    """What one call of a candidate launched: planned, as the graph clock times it, and as a user calls it."""

    problem: str
    kernel: str
    config: str
    planned: list[SeenLaunch]
    by_user: list[SeenLaunch]


Paths = Mapping[tuple[str, str, str], Seen]  # by problem, kernel and config


@dataclass(frozen=True, slots=True)
class Todo:
    """A problem and the candidates that say they serve it."""

    problem: Problem
    candidates: tuple[Candidate, ...]


def look(todo: Sequence[Todo], seed: int, on_problem: Callable[[int, str], None]) -> Paths:
    """Profile every candidate on every problem, in another process.

    A process that a kernel takes down is started again after the problem that it died on; what was not seen is not in the
    result. ``on_problem(index, text)`` is told of each problem that has been begun.

    Raises:
        RuntimeError: nothing can be seen at all; the message says why.
    """
    paths: dict[tuple[str, str, str], Seen] = {}
    first = 0
    while first < len(todo):
        begun = first - 1
        try:
            for line in lines_from(_MODULE, _asked(todo[first:], seed), {}):
                said = json.loads(line)
                if "begun" in said:
                    begun = first + said["begun"]
                    on_problem(begun, str(todo[begun].problem))
                else:
                    seen = Seen.model_validate(said)
                    paths[seen.problem, seen.kernel, seen.config] = seen
        except RuntimeError:
            if begun < first:
                raise  # it did not even begin: no profiler, no GPU
            first = begun + 1
        else:
            break
    return paths


def _asked(todo: Sequence[Todo], seed: int) -> str:
    problems = [[str(one.problem), [[c.name, str(c.config)] for c in one.candidates]] for one in todo]
    return json.dumps({"seed": seed, "problems": problems})


def main(seed: int, problems: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
    """Profile here and print. A candidate that does not run is left out: whoever times it will meet its error."""
    from flashmoe_science.operations import kernel_named

    bench = bench_here()
    blind = profiler_works(bench.device, bench.synchronize)
    if blind is not None:
        raise RuntimeError(blind)
    for index, (text, named) in enumerate(problems):
        print(json.dumps({"begun": index}), flush=True)
        candidates = [Candidate(kernel_named(name), Config.parse(config)) for name, config in named]
        for seen in _seen(bench, parse_problem(text), candidates, seed):
            print(seen.model_dump_json(), flush=True)


def _seen(bench: Bench, problem: Problem, candidates: Sequence[Candidate], seed: int) -> Iterator[Seen]:
    inputs = make_inputs(problem, bench.device, seed, l2_bytes=0).first
    running: list[Candidate] = []
    calls: list[partial[object]] = []
    for candidate in candidates:
        try:
            planned = candidate.planned(inputs)
            both = [partial(call, inputs) for call in (planned, user_call(candidate, planned, problem, bench.gpu))]
            for call in both:
                call()
            bench.synchronize()
        except Exception:  # the timing process meets the same error, and records it
            continue
        running.append(candidate)
        calls += both
    launched = profile(calls, bench.synchronize) if calls else []
    yield from _both(problem, running, launched)
    # Said again with their clusters: what is known is said before the driver is asked for more.
    with_theirs: list[list[SeenLaunch]] = []
    for index, (call, seen) in enumerate(zip(calls, launched, strict=True)):
        same = index % 2 == 1 and call.func is calls[index - 1].func and seen == launched[index - 1]
        with_theirs.append(with_theirs[-1] if same else with_clusters(call, seen))
    yield from _both(problem, running, with_theirs)


def _both(problem: Problem, running: Sequence[Candidate], launched: Sequence[list[SeenLaunch]]) -> Iterator[Seen]:
    """One answer a candidate; ``launched`` holds two calls of each."""
    for candidate, planned, by_user in zip(running, launched[::2], launched[1::2], strict=True):
        yield Seen(problem=str(problem), kernel=candidate.name, config=str(candidate.config), planned=planned, by_user=by_user)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the timing process keeps them
    given = json.load(sys.stdin)
    main(given["seed"], given["problems"])
