"""What a user means by a version: a commit, a run, a kernel, or a kernel in a run; and what the records hold of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.summary import front_of
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Cache, Clock

_LEAST_COMMIT = 4  # digits that may stand for a commit

Place = tuple[str, str, Clock, Cache]  # gpu, problem, clock, cache


class VersionError(ValueError):
    """Words that name no version, or several, said in one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one run says of a version in one place."""

    judged: JudgedRun
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Version:
    """A column of a comparison. Without ``kernel`` it is the fastest kernel under test on each problem."""

    label: str
    runs: tuple[JudgedRun, ...]
    kernel: str | None = None

    def entries(self) -> dict[Place, list[Entry]]:
        """Place -> what each run says there, oldest run first."""
        found: dict[Place, list[Entry]] = defaultdict(list)
        for judged in sorted(self.runs, key=lambda judged: judged.age):
            for verdict in self._verdicts(judged):
                found[verdict.gpu, verdict.problem, verdict.clock, verdict.cache].append(Entry(judged, verdict))
        return dict(found)

    def _verdicts(self, judged: JudgedRun) -> Iterable[Verdict]:
        if self.kernel is not None:
            return [row for row in judged.verdicts if row.kernel == self.kernel]
        groups: dict[tuple[Clock, Cache], list[Verdict]] = defaultdict(list)
        for row in judged.verdicts:
            groups[row.clock, row.cache].append(row)
        return [row for rows in groups.values() for row in front_of(rows)]


def version(word: str, known: Sequence[JudgedRun]) -> Version:
    """The version that a word names among known runs.

    Raises:
        VersionError: it names none, or more than one.
    """
    if any(word in judged.kernels for judged in known):
        return Version(word, tuple(judged for judged in known if word in judged.kernels), word)
    found = _runs_named(word, known)
    if found:
        return Version(word, found)
    prefix, colon, kernel = word.partition(":")
    found = _runs_named(prefix, known) if colon else ()
    if not found:
        raise VersionError(f"{word!r} names no run, commit or kernel on record; {_known(known)}")
    return of_kernel(word, found, kernel)


def of_kernel(label: str, runs: Sequence[JudgedRun], kernel: str) -> Version:
    """A kernel in these runs. Raises VersionError where none of them has it."""
    having = tuple(judged for judged in runs if kernel in judged.kernels)
    if not having:
        names = sorted(frozenset[str]().union(*(judged.kernels for judged in runs)))
        raise VersionError(f"{label!r}: no kernel {kernel!r} there; it has {', '.join(names) or 'none'}")
    return Version(label, having, kernel)


def _runs_named(word: str, known: Sequence[JudgedRun]) -> tuple[JudgedRun, ...]:
    """The run whose id begins so, else all runs of the commit that begins so."""
    if not word:
        return ()
    exact = [judged for judged in known if judged.run.header.run == word]
    runs = exact or [judged for judged in known if judged.run.header.run.startswith(word)]
    if len(runs) > 1:
        ids = _some(judged.run.header.run for judged in runs)
        raise VersionError(f"{word!r} begins the ids of {len(runs)} runs: {ids}; write more of it")
    if runs:
        return tuple(runs)
    enough = len(word) >= _LEAST_COMMIT
    of_commit = [judged for judged in known if enough and (judged.run.header.commit or "").startswith(word)]
    commits = {judged.run.header.commit for judged in of_commit}
    if len(commits) > 1:
        raise VersionError(f"{word!r} begins {len(commits)} commits: {_some(map(str, commits))}; write more of it")
    return tuple(of_commit)


def _known(known: Sequence[JudgedRun]) -> str:
    if not known:
        return "there are no records"
    runs = _some(judged.run.header.run for judged in known)
    kernels = _some(frozenset[str]().union(*(judged.kernels for judged in known)), 12)
    return f"runs: {runs}; kernels: {kernels or 'none'}"


def _some(names: Iterable[str], most: int = 4) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
