"""What a user means by a version: a commit, a run, a kernel, or a kernel in a run; and what the records hold of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flashmoe_science.judge.matchups import Matchup, matchups
from flashmoe_science.judge.summary import front_of
from flashmoe_science.judge.trust import is_control
from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.judge.verdicts import verdicts_of
from flashmoe_science.records import Cache, CallPathRow, Clock, CorrectnessRow, RefusalRow, SeenLaunch, TimingRow
from flashmoe_science.store import Run

_LEAST_COMMIT = 4  # digits that may stand for a commit

Place = tuple[str, str, Clock, Cache]  # gpu, problem, clock, cache


class VersionError(ValueError):
    """Words that name no version, or several, said in one line."""


class Facts:
    """One run as a comparison looks things up in it. What takes time is done when it is first asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return verdicts_of(self.run)

    @cached_property
    def pairs(self) -> list[Matchup]:
        return matchups(self.run)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Every kernel that it speaks of, also of one that was refused before it could be timed."""
        rows = (row for row in self.run.rows if isinstance(row, TimingRow | CorrectnessRow | RefusalRow))
        return frozenset(name for row in rows for name in (row.kernel, getattr(row, "rival", None)) if name)

    def error(self, verdict: Verdict) -> CorrectnessRow | None:
        """The oracle's row of what a verdict speaks of; of a kernel that was refused before it had a config, the worst."""
        rows = [row for row in self.run.rows if isinstance(row, CorrectnessRow) and _same(row, verdict)]
        return min(rows, key=lambda row: row.passed, default=None)

    def launches(self, verdict: Verdict) -> list[SeenLaunch]:
        rows = [row for row in self.run.rows if isinstance(row, CallPathRow) and _same(row, verdict)]
        return rows[-1].launches if rows else []

    def samples(self, verdict: Verdict) -> TimingRow | None:
        """The timing row of the verdict's kernel, seen from it, with the most samples."""
        found = []
        for row in self.run.rows:
            if not isinstance(row, TimingRow) or is_control(row):
                continue
            if (row.problem, row.clock, row.cache) != (verdict.problem, verdict.clock, verdict.cache):
                continue
            if (row.kernel, row.config) == (verdict.kernel, verdict.config):
                found.append(row)
            elif (row.rival, row.rival_config) == (verdict.kernel, verdict.config):
                found.append(row.model_copy(update={"a": row.b, "b": row.a}))
        return max(found, key=lambda row: len(row.a), default=None)


def _same(row: CorrectnessRow | CallPathRow, verdict: Verdict) -> bool:
    return (row.problem, row.kernel) == (verdict.problem, verdict.kernel) and verdict.config in ("", row.config)


@dataclass(frozen=True, slots=True)
class Entry:
    """What one run says of a version in one place."""

    facts: Facts
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Version:
    """A column of a comparison. Without ``kernel`` the fastest of what was on trial speaks for each problem."""

    label: str
    runs: tuple[Facts, ...]
    kernel: str | None = None

    def entries(self) -> dict[Place, list[Entry]]:
        """Place -> what each run says there, oldest run first."""
        found: dict[Place, list[Entry]] = defaultdict(list)
        for facts in sorted(self.runs, key=lambda facts: (facts.run.header.started, facts.run.header.run)):
            for verdict in self._speaking(facts):
                found[verdict.gpu, verdict.problem, verdict.clock, verdict.cache].append(Entry(facts, verdict))
        return dict(found)

    def _speaking(self, facts: Facts) -> Iterable[Verdict]:
        if self.kernel is not None:
            return [row for row in facts.verdicts if row.kernel == self.kernel]
        groups: dict[tuple[Clock, Cache], list[Verdict]] = defaultdict(list)
        for row in facts.verdicts:
            groups[row.clock, row.cache].append(row)
        return [row for rows in groups.values() for row in front_of(rows)]


def version(word: str, known: Sequence[Facts]) -> Version:
    """The version that a word names among known runs.

    Raises:
        VersionError: it names none, or more than one.
    """
    if any(word in facts.kernels for facts in known):
        return Version(word, tuple(facts for facts in known if word in facts.kernels), word)
    found = _runs_named(word, known)
    if found:
        return Version(word, found)
    prefix, colon, kernel = word.partition(":")
    found = _runs_named(prefix, known) if colon else ()
    if not found:
        raise VersionError(f"{word!r} names no run, commit or kernel on record; {_known(known)}")
    return of_kernel(word, found, kernel)


def of_kernel(label: str, runs: Sequence[Facts], kernel: str) -> Version:
    """A kernel in these runs. Raises VersionError where none of them has it."""
    having = tuple(facts for facts in runs if kernel in facts.kernels)
    if not having:
        names = sorted(frozenset[str]().union(*(facts.kernels for facts in runs)))
        raise VersionError(f"{label!r}: no kernel {kernel!r} there; it has {', '.join(names) or 'none'}")
    return Version(label, having, kernel)


def _runs_named(word: str, known: Sequence[Facts]) -> tuple[Facts, ...]:
    """The run whose id begins so, else all runs of the commit that begins so."""
    if not word:
        return ()
    exact = [facts for facts in known if facts.run.header.run == word]
    runs = exact or [facts for facts in known if facts.run.header.run.startswith(word)]
    if len(runs) > 1:
        ids = _some(facts.run.header.run for facts in runs)
        raise VersionError(f"{word!r} begins the ids of {len(runs)} runs: {ids}; write more of it")
    if runs:
        return tuple(runs)
    enough = len(word) >= _LEAST_COMMIT
    of_commit = [facts for facts in known if enough and (facts.run.header.commit or "").startswith(word)]
    commits = {facts.run.header.commit for facts in of_commit}
    if len(commits) > 1:
        raise VersionError(f"{word!r} begins {len(commits)} commits: {_some(map(str, commits))}; write more of it")
    return tuple(of_commit)


def _known(known: Sequence[Facts]) -> str:
    if not known:
        return "there are no records"
    runs = _some(facts.run.header.run for facts in known)
    kernels = _some(frozenset[str]().union(*(facts.kernels for facts in known)), 12)
    return f"runs: {runs}; kernels: {kernels or 'none'}"


def _some(names: Iterable[str], most: int = 4) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
