"""What recorded predictions came to: the predicted gain beside the measured one, where a later run measured the change.

A prediction counts only against runs that began after it was made, of source that had changed since the run it was made from
(or of the version that it names), and before the next prediction of the same kernel and problem: that change, not a later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
from flashmoe_science.judge.diagnose.plan import Step
from flashmoe_science.judge.stats import quotient
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.judge.verdicts import Verdict, verdicts_of
from flashmoe_science.records import PredictionRow
from flashmoe_science.store import Run

Said = Literal["hit", "missed", "exceeded", "not measured yet"]

WITHIN = 1.2  # a measured gain this near to the predicted one is a hit


@dataclass(frozen=True, slots=True)
class Outcome:
    """``gain`` is the time before over the time after, with an interval where both runs timed the kernel beside the same rival.

    ``off_by`` is the predicted gain over the measured one: 4 says that it gave a quarter of what was predicted. ``part`` is,
    where the gain exceeds the prediction, the part of the time that the change must have sped up (None: not even all of it).
    """

    prediction: PredictionRow
    said: Said
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    off_by: float | None = None
    part: float | None = None
    run: str | None = None
    how: str | None = None

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "prediction"}
        return self.prediction.model_dump(exclude={"schema_version", "kind"}) | {"outcome": values}


def part_shown(gain: float, speedup: float) -> float | None:
    """The part of the time that must have been sped up ``speedup`` times (it may be infinite) for the whole to gain ``gain``.

    None where not even all of it would do.
    """
    return None if gain > speedup else (1 - 1 / gain) / (1 - 1 / speedup)


def prediction(run: str, diagnosis: Diagnosis, step: Step, made_in: str | None, made: datetime) -> PredictionRow:
    """What a step of a plan predicts, as a row of a run. ``made_in`` is the kernel that will hold the change, if another.

    Raises:
        ValueError: no time is on record to predict from.
    """
    before = diagnosis.facts.times.get(step.clock)
    if before is None:
        raise ValueError(f"'{step.change}' cannot be recorded: no time on the {step.clock} clock is on record to predict from")
    return PredictionRow(
        run=run, made=made.isoformat(timespec="seconds"), problem=diagnosis.problem, kernel=diagnosis.kernel,
        config=diagnosis.facts.config, gpu=diagnosis.facts.machine, clock=step.clock, change=step.change,
        hypothesis=step.hypothesis, most_gain=step.most_gain, cumulated=step.cumulated, part=step.part,
        speedup=None if math.isinf(step.speedup) else step.speedup, how=step.how, before_ns=before.time_ns,
        before_run=before.run, made_in=made_in,
    )  # fmt: skip


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Every recorded prediction, the oldest first, with what came of it."""
    ordered = sorted(runs, key=lambda run: (run.header.started, run.header.run))
    made = sorted((row for run in ordered for row in run.rows if isinstance(row, PredictionRow)), key=lambda row: row.made)
    return [_outcome(row, ordered, made) for row in made]


def _outcome(prediction: PredictionRow, ordered: Sequence[Run], made: Sequence[PredictionRow]) -> Outcome:
    later = [row.made for row in made if row.made > prediction.made and _about(row) == _about(prediction)]
    until = min(later, default="9")  # after every date
    before = next((run for run in ordered if run.header.run == prediction.before_run), None)
    for run in reversed(ordered):
        if not prediction.made < run.header.started < until:
            continue
        after = _verdict_of(run, prediction, prediction.made_in or prediction.kernel)
        # A user's own kernel is not in the source digest.
        changed = before is None or run.header.source_digest != before.header.source_digest
        if after is not None and (changed or after.origin == "candidate"):
            return _compared(prediction, after, _verdict_of(before, prediction, prediction.kernel) if before else None)
    return Outcome(prediction, "not measured yet")


def _about(one: PredictionRow) -> tuple[str | None, ...]:
    """What it is about; versions of their own do not get in each other's way."""
    return one.problem, one.kernel, one.gpu, one.clock, one.made_in


def _verdict_of(run: Run, prediction: PredictionRow, kernel: str) -> Verdict | None:
    """The run's verdict on a kernel, where it has one that is not refused; the fastest where there are several."""
    wanted = prediction.gpu, prediction.problem, kernel, prediction.clock
    rows = verdicts_of(run) if gpu_name(run.header.environment) == prediction.gpu else []
    found = [row for row in rows if (row.gpu, row.problem, row.kernel, row.clock) == wanted and row.time_ns]
    return min(found, key=lambda verdict: verdict.time_ns or math.inf, default=None)


def _compared(prediction: PredictionRow, after: Verdict, before: Verdict | None) -> Outcome:
    assert after.time_ns is not None
    gain, low, high = prediction.before_ns / after.time_ns, None, None
    how = "times of two runs, which differ by some 5% by themselves"
    if before is not None and before.interval and after.interval and _rival(before) == _rival(after):
        found = quotient(after.interval, before.interval)
        gain, low, high = found.ratio, found.low, found.high
        how = f"each beside {after.rival} in its own run"
    off_by = prediction.most_gain / gain
    said: Said = "hit" if abs(math.log(off_by)) <= math.log(WITHIN) else "missed" if off_by > 1 else "exceeded"
    part = part_shown(gain, prediction.speedup or math.inf) if said == "exceeded" else None
    return Outcome(prediction, said, gain, low, high, off_by, part, after.run, how)


def _rival(verdict: Verdict) -> tuple[str | None, str | None, str]:
    return (verdict.rival, verdict.rival_config, verdict.cache)
