"""Going on with a run that was cut: whether this is still the same run, and what of it is left to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.preflight import commit, environment, source_digest
from flashmoe_science.problem import Problem
from flashmoe_science.records import Environment, PromiseRow, RefusalRow, ResumeRow
from flashmoe_science.store import Run

_MUST_AGREE = ("gpu", "sm_count", "driver", "cuda", "cpu", "python", "torch", "triton", "packages")


class CannotResume(ValueError):
    """A run cannot be gone on with, said in one line."""


def check_same(
    run: Run, bench: Bench, problems: Sequence[Problem] | None, candidates: Mapping[str, str | None] | None = None
) -> None:
    """Whether what would be measured now belongs into this run.

    ``problems`` of None are each candidate's own; ``candidates`` are the digests of their files as they are now.

    Raises:
        CannotResume: the source, the machine, its software, the problems or a candidate's file are others; or the run was
            stopped for a reason that lies in it.
    """
    differences = [*_other_source(run), *_other_machine(run.header.environment, environment(bench))]
    differences += _other_candidates(run, candidates or {})
    unknown = set() if problems is None else _problems_of(run) - {str(problem) for problem in problems}
    if unknown:
        differences.append(f"its problems are others ({', '.join(sorted(unknown)[:2])})")
    if differences:
        raise CannotResume(f"{run.path} cannot be gone on with: {'; '.join(differences)}; start a new run")
    for row in run.rows:
        if isinstance(row, RefusalRow) and row.problem is None and row.kernel is None:
            raise CannotResume(f"{run.path} cannot be gone on with: it was stopped ({row.reason}); start a new run")


def resume_row(run: Run, candidates: Sequence[str] = ()) -> ResumeRow:
    """Where the run goes on: which problems were begun and not finished (by each of ``candidates`` where there are any), and
    how long it had taken."""
    resumes = [row for row in run.rows if isinstance(row, ResumeRow)]
    began, before = (resumes[-1].resumed, resumes[-1].seconds_before) if resumes else (run.header.started, 0.0)
    worked = 0.0 if run.written is None else max(0.0, run.written - datetime.fromisoformat(began).timestamp())
    return ResumeRow(
        run=run.header.run,
        resumed=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        source_digest=source_digest(),
        again=[] if candidates else sorted(_problems_of(run) - run.done),
        again_of={one: begun for one in candidates if (begun := sorted(_problems_of(run, one) - run.done_by(one)))},
        seconds_before=round(before + worked, 3),
    )


def left(run: Run, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems that are not finished, in order."""
    return tuple(problem for problem in problems if str(problem) not in run.done)


def _problems_of(run: Run, candidate: str | None = None) -> set[str]:
    """The problems that rows speak of, or those that rows of one candidate do."""
    rows = run.rows if candidate is None else [row for row in run.rows if getattr(row, "kernel", None) == candidate]
    named = (getattr(row, "problem", None) for row in rows)
    return {problem for problem in named if problem is not None}


def _other_candidates(run: Run, now: Mapping[str, str | None]) -> list[str]:
    """Candidates whose files are not those that the run began with, as far as can be told."""
    differences = []
    for row in run.rows:
        if isinstance(row, PromiseRow) and row.kernel in now:
            if row.source_digest is None or now[row.kernel] is None:
                differences.append(f"it cannot be told whether {row.kernel} has changed")
            elif row.source_digest != now[row.kernel]:
                differences.append(f"{row.kernel} has changed, or a candidate that it is set against")
    return differences


def _other_source(run: Run) -> Collection[str]:
    then, now = run.header.source_digest, source_digest()
    return [] if then == now else [f"the package's source is another (its digest was {then[:12]}, here {now[:12]})"]


def _other_machine(then: Environment, now: Environment) -> Collection[str]:
    pairs = ((name, getattr(then, name), getattr(now, name)) for name in _MUST_AGREE)
    return [f"its {name} was {_said(before)}, here {_said(here)}" for name, before, here in pairs if before != here]


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items()) or "none"
    return "none" if value is None else str(value)
