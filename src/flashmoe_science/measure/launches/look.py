"""What calls launch, seen by a process that only profiles.

A profiler that has once been attached slows every later launch of its process (CUPTI is not detached when a session ends), so
the process that times must never have profiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from flashmoe_science.measure.channel import Child, Died, Failed
from flashmoe_science.measure.worker.worker import MODULE
from flashmoe_science.problem import Problem
from flashmoe_science.records import SeenLaunch

# By problem, name for the worker (empty: the function that is loaded) and config: the launches of each call that was looked at.
Launches = dict[tuple[str, str, str], list[list[SeenLaunch]]]


class Blind(Exception):
    """The profiler sees nothing here; the message says why."""


def look(
    spec: str | None,
    contract: str,
    todo: Sequence[tuple[Problem, Sequence[tuple[str, str]]]],
    seed: int,
    watchdog_s: float,
    step: Callable[[int, Problem], None],
) -> Launches:
    """Profile each (name, config) on each problem. What takes the process down, or fails, is not in the result: the exam meets
    the same end, and records it.

    Args:
        spec: a function to load, or None for ``contract``, the operation's name.
        step: told of each problem's place and the problem.

    Raises:
        Blind: nothing can be seen at all.
    """
    seen: Launches = {}
    child: Child | None = None
    try:
        for index, (problem, who) in enumerate(todo):
            step(index, problem)
            with suppress(Failed, Died):
                if child is None or not child.alive:
                    child = Child(MODULE, watchdog_s)
                    child.ask("open", spec=spec, contract=contract)
                child.ask("problem", text=str(problem))
                answer = child.ask("launches", who=list(who), case={"seed": seed})
                if "blind" in answer:
                    raise Blind(str(answer["blind"]))
                for name, config, calls in answer["launches"]:
                    launches = [[SeenLaunch.model_validate(one) for one in call] for call in calls]
                    seen[str(problem), name, config] = launches
    finally:
        if child is not None:
            child.close()
    return seen
