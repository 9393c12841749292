"""What calls launch, seen by a process that only profiles.

A profiler that has once been attached slows every later launch of its process (CUPTI is not detached when a session ends), so
the process that times must never have profiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from flashmoe_science.measure.channel import Died, Failed, Home
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
    step: Callable[[str], None],
) -> Launches:
    """Profile each (name, config) on each problem. What takes the process down, or fails, is not in the result: the exam meets
    the same end, and records it.

    Args:
        spec: a function to load, or None for ``contract``, the operation's name.
        step: told what comes.

    Raises:
        Blind: nothing can be seen at all.
    """
    seen: Launches = {}
    with Home(spec, contract, watchdog_s) as home:
        for index, (problem, who) in enumerate(todo, 1):
            step(f"call path {index} of {len(todo)}: {problem}")
            with suppress(Failed, Died):
                answer = home.at(problem).ask("launches", who=list(who), case={"seed": seed})
                if "blind" in answer:
                    raise Blind(str(answer["blind"]))
                for name, config, calls in answer["launches"]:
                    launches = [[SeenLaunch.model_validate(one) for one in call] for call in calls]
                    seen[str(problem), name, config] = launches
    return seen
