"""What calls launch, a candidate's and its rivals', seen by processes that only profile (see ``paths``: they must not time)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from flashmoe_science.measure.trial.parties import HOST
from flashmoe_science.measure.trial.warden import Died, Failed, Ward
from flashmoe_science.problem import Problem
from flashmoe_science.records import SeenLaunch

Launches = dict[tuple[str, str], list[SeenLaunch]]  # by problem and who; the candidate is ""


class Blind(Exception):
    """The profiler sees nothing here; the message says why."""


def launched(
    spec: str,
    todo: Sequence[tuple[Problem, Sequence[tuple[str, str]]]],
    seed: int,
    watchdog_s: float,
    step: Callable[[Problem], None],
) -> Launches:
    """Profile one call of each (who, config) on each problem. Whoever takes the process down, or fails, is not in the result:
    whoever calls it in earnest meets the same end, and records it.

    Raises:
        Blind: nothing can be seen at all.
    """
    seen: Launches = {}
    ward: Ward | None = None
    try:
        for problem, who in todo:
            step(problem)
            with suppress(Failed, Died):
                if ward is None or not ward.alive:
                    ward = Ward(HOST, watchdog_s)
                    ward.ask("open", spec=spec, contract="")
                ward.ask("problem", text=str(problem))
                said = ward.ask("launches", who=who, case={"seed": seed})
                if "blind" in said:
                    raise Blind(str(said["blind"]))
                for name, launches in said["launches"].items():
                    seen[str(problem), name] = [SeenLaunch.model_validate(one) for one in launches]
    finally:
        if ward is not None:
            ward.close()
    return seen
