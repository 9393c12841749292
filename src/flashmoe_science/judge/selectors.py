"""What a user means by a version: a commit, a run, a kernel, or a kernel in a run; and what the records hold of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.summary import groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Cache, Clock

_LEAST_COMMIT = 4  # digits that may stand for a commit


class Place(NamedTuple):
    gpu: str
    problem: str
    clock: Clock
    cache: Cache


class VersionError(ValueError):
    """Words that name no version, or several, said in one line."""


class Entry(NamedTuple):
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
            rows = [row for row in judged.verdicts if row.kernel == self.kernel]
            if self.kernel is None:
                rows = [row for group in groups(judged.verdicts) for row in group.front]
            for row in rows:
                found[Place(row.gpu, row.problem, row.clock, row.cache)].append(Entry(judged, row))
        return dict(found)


def version(word: str, known: Sequence[JudgedRun]) -> Version:
    """The version that a word names among known runs: a kernel, a run, a commit, or a kernel in one of these, as RUN:KERNEL.
    Raises VersionError: it names none, or more than one."""
    having = tuple(judged for judged in known if word in judged.kernels)
    if having:
        return Version(word, having, word)
    found = _runs_named(word, known)
    if found:
        return Version(word, found)
    prefix, colon, kernel = word.partition(":")
    found = _runs_named(prefix, known) if colon else ()
    if not found:
        names = f"runs: {_some(one.run.header.run for one in known)}; kernels: {_some(_kernels(known), 12) or 'none'}"
        told = names if known else "there are no records"
        raise VersionError(f"{word!r} names no run, commit or kernel on record; {told}")
    having = tuple(judged for judged in found if kernel in judged.kernels)
    if not having:
        raise VersionError(f"{word!r}: no kernel {kernel!r} there; it has {', '.join(sorted(_kernels(found))) or 'none'}")
    return Version(word, having, kernel)


def _runs_named(word: str, known: Sequence[JudgedRun]) -> tuple[JudgedRun, ...]:
    """The run whose id begins so, else all runs of the commit that begins so."""
    if not word:
        return ()
    runs = {judged.run.header.run: judged for judged in known if judged.run.header.run.startswith(word)}
    if word in runs or len(runs) == 1:
        return (runs.get(word) or next(iter(runs.values())),)
    if runs:
        raise VersionError(f"{word!r} begins the ids of {len(runs)} runs: {_some(runs)}; write more of it")
    enough = len(word) >= _LEAST_COMMIT
    of_commit = [judged for judged in known if enough and (judged.run.header.commit or "").startswith(word)]
    commits = {str(judged.run.header.commit) for judged in of_commit}
    if len(commits) > 1:
        raise VersionError(f"{word!r} begins {len(commits)} commits: {_some(commits)}; write more of it")
    return tuple(of_commit)


def _kernels(runs: Iterable[JudgedRun]) -> frozenset[str]:
    return frozenset[str]().union(*(judged.kernels for judged in runs))


def _some(names: Iterable[str], most: int = 4) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
