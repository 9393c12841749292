"""Versions compared: a commit, a run, a kernel, or a kernel in a run, in the places that they share.

A place is a problem, a GPU, a clock and a cache: times of different places are never compared. A ratio is taken in one of two
ways (``how``):

- "paired": the two were sampled in alternation, in one run, on the same inputs;
- "through NAME": each was paired with the same rival, in two runs or in one. What slowed the machine slowed the rival too and
  cancels.

Where neither is possible there is no ratio: another state of the machine would shift it unseen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.standing import JudgedRun, precedence
from flashmoe_science.judge.stats import MIN_PAIRS, Call, Interval, call, geometric_mean, quotient
from flashmoe_science.judge.summary import groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Cache, Clock

USERS_OWN = "sdpa"  # what a PyTorch user has without us
_LEAST_COMMIT = 4  # digits of a commit that may name it


class Place(NamedTuple):
    gpu: str
    problem: str
    clock: Clock
    cache: Cache

    @property
    def title(self) -> str:
        return f"{self.gpu}, {self.clock} clock, {self.cache} cache"


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one version in one place, by one run. ``over_first`` is its speed-up over the first version (above 1: this
    version is faster), ``how`` the way in which the two were compared."""

    judged: JudgedRun
    verdict: Verdict
    over_first: Interval | None = None
    how: str | None = None

    @property
    def judgement(self) -> Call | None:
        """The speed-up over the first version as a verdict; None where there are too few samples."""
        return call(self.over_first) if self.over_first is not None and self.over_first.pairs >= MIN_PAIRS else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values: its time and speed-ups, whether it is right, and what the launch with the most threads takes."""
        row, oracle, launches = self.verdict, self.judged.error(self.verdict), self.judged.launches(self.verdict)
        sdpa = next((one.interval for one in self.judged.comparisons_of(row) if one.rival == USERS_OWN), None)
        launch = max(launches, key=lambda one: one.threads, default=None)
        own = ("run", "commit", "kernel", "config", "time_ns", "tflops", "peak_extra_bytes")
        return {name: getattr(row, name) for name in own} | {
            "correct": oracle and oracle.passed,
            "error": oracle and oracle.tightest.max,
            "allowed": oracle and oracle.tightest.bound_max,
            "refused": row.reason if row.verdict == "refused" else None,
            "over_first": self.over_first and self.over_first.ends,
            "how": self.how,
            "said": self.judgement,
            "over_sdpa": sdpa and sdpa.ends,
            "threads": launch and math.prod(launch.block),
            "registers": launch and launch.registers,
            "shared_bytes": launch and launch.shared_bytes,
        }


def compare(words: Sequence[str], runs: Sequence[JudgedRun]) -> dict[Place, list[Cell | None]]:
    """For each place that the first version shares with another, a cell for each version in the order of ``words``; None for a
    version without a verdict there. Raises ValueError, in one line: fewer than two versions, one given twice, a word that names
    none or several, a version that shares no GPU, problem, clock or cache with the first."""
    if len(words) < 2:
        raise ValueError("there is only one version; a comparison needs at least 2")
    if twice := [word for word in words if words.count(word) > 1]:
        raise ValueError(f"version {twice[0]!r} is given twice; there is nothing to compare it with")
    entries = [_entries(word, runs) for word in words]
    for word, places in zip(words, entries, strict=True):
        if not places:
            raise ValueError(f"{word} has no verdict on what was asked for")
        for upto, what in enumerate(("GPU", "problem", "clock", "cache"), 1):
            first, own = ({place[:upto] for place in one} for one in (entries[0], places))
            if not first & own:
                apart = f"no {what} in common ({min(first)[-1]!r} and {min(own)[-1]!r}, say)"
                raise ValueError(f"{words[0]} and {word} have {apart}; only times of the same {what} are compared")
    shared = [place for place in entries[0] if any(place in places for places in entries[1:])]
    return {place: _row([places.get(place, []) for places in entries]) for place in shared}


class Total(NamedTuple):
    """A version compared with the first on one GPU, clock and cache: the number of shared places, the counts of verdicts there,
    and the speed-up over the first: geometric mean, minimum, maximum; None where no place has one."""

    version: str
    places: int
    counts: dict[str, int]
    mean: Interval | None
    least: float | None
    most: float | None


def totals(words: Sequence[str], found: Mapping[Place, Sequence[Cell | None]]) -> dict[str, list[Total]]:
    """GPU, clock and cache in words -> a total for each version but the first."""
    return {
        title: [_total(word, [cells[at] for _, cells in rows]) for at, word in enumerate(words) if at]
        for title, rows in grouped(found.items(), lambda item: item[0].title).items()
    }


def _total(word: str, cells: Sequence[Cell | None]) -> Total:
    here = [cell for cell in cells if cell is not None]
    over = [cell.over_first for cell in here if cell.over_first is not None]
    ratios = [one.ratio for one in over]
    counts = dict(Counter[str](cell.judgement or "no ratio" for cell in here))
    least, most = min(ratios, default=None), max(ratios, default=None)
    return Total(word, len(here), counts, geometric_mean(over) if over else None, least, most)


def _entries(word: str, runs: Sequence[JudgedRun]) -> dict[Place, list[Cell]]:
    """Place -> the version's cells there, oldest run first. Without a kernel, the version is the fastest kernel in question on
    each problem."""
    chosen, kernel = _version(word, runs)
    cells = []
    for judged in sorted(chosen, key=lambda judged: judged.run.age):
        fronts = (row for group in groups(judged.verdicts) for row in group.front)
        rows = fronts if kernel is None else (row for row in judged.verdicts if row.kernel == kernel)
        cells += [Cell(judged, row) for row in rows]
    return grouped(cells, lambda one: Place(one.verdict.gpu, one.verdict.problem, one.verdict.clock, one.verdict.cache))


def _version(word: str, runs: Sequence[JudgedRun]) -> tuple[list[JudgedRun], str | None]:
    """The runs, and the kernel in them, that a word names: a kernel, a run, a commit, or a kernel in one of these, as
    RUN:KERNEL."""
    if having := [judged for judged in runs if word in judged.kernels]:
        return having, word
    if found := _runs_named(word, runs):
        return found, None
    prefix, _, kernel = word.partition(":")
    if having := [judged for judged in _runs_named(prefix, runs) if kernel in judged.kernels]:
        return having, kernel
    names = ", ".join(sorted(judged.run.header.run for judged in runs)[:4])
    kernels = ", ".join(sorted({name for judged in runs for name in judged.kernels})[:12])
    raise ValueError(f"{word!r} names no run, commit or kernel on record; runs: {names}; kernels: {kernels or 'none'}")


def _runs_named(word: str, runs: Sequence[JudgedRun]) -> list[JudgedRun]:
    """The run whose id begins with ``word``, or all runs of the commit whose hash does."""
    named: dict[str, list[JudgedRun]] = defaultdict(list)
    for judged in runs:
        header = judged.run.header
        for name, least in ((header.run, 1), (header.commit or "", _LEAST_COMMIT)):
            if len(word) >= least and name.startswith(word):
                named[name].append(judged)
    if len(named) > 1 and word not in named:
        names = ", ".join(sorted(named)[:4])
        raise ValueError(f"{word!r} begins the names of {len(named)} runs or commits: {names}; write more of it")
    return named[word] if word in named else next(iter(named.values()), [])


def _row(found: Sequence[Sequence[Cell]]) -> list[Cell | None]:
    """A cell for each version: all of one run if it has every version, else each of the run that counts for it."""
    common = set.intersection(*({id(cell.judged) for cell in cells} for cells in found if cells))
    chosen: list[Cell | None] = []
    for cells in found:
        able = [cell for cell in cells if id(cell.judged) in common] or cells
        able = [cell for cell in able if cell.verdict.time_ns is not None] or able
        chosen.append(max(able, key=lambda cell: precedence(cell.verdict), default=None))
    first, *others = chosen
    assert first is not None  # its places are those that are compared
    return [first, *(cell and Cell(cell.judged, cell.verdict, *_over(first, cell)) for cell in others)]


def _over(first: Cell, cell: Cell) -> tuple[Interval | None, str | None]:
    """The speed-up over ``first``, by the best way there is, and the name of that way."""
    if first.verdict.time_ns is None or cell.verdict.time_ns is None:
        return None, None
    own, same = ((one.verdict.run, one.verdict.kernel, one.verdict.config) for one in (cell, first))
    if own == same:
        return None, "the same samples"
    pairs = cell.judged.comparisons_of(cell.verdict)
    if first.judged is cell.judged:
        for pair in pairs:
            if (pair.rival, pair.rival_config) == same[1:]:
                return pair.interval, "paired"
    # The ratio of both ratios to a rival that ran the same in both runs; of several, the one that leaves the least open.
    shared = {(one.rival, one.rival_config): one for one in first.judged.comparisons_of(first.verdict)}
    found = [
        (quotient(pair.interval, shared[key].interval), f"through {pair.rival}")
        for pair in pairs
        if (key := (pair.rival, pair.rival_config)) in shared and _is_same_rival(pair, first.judged, cell.judged)
    ]
    return min(found, key=lambda one: one[0].half_width, default=(None, None))


def _is_same_rival(pair: Comparison, a: JudgedRun, b: JudgedRun) -> bool:
    """Whether a rival is the same code in both runs: a peer by the versions of what brings it, ours by its source."""
    one, other = a.run.header, b.run.header
    if one.run == other.run:
        return True
    if pair.rival_origin != "peer":
        return pair.rival_origin == "ours" and one.source_digest == other.source_digest
    versions = attrgetter("torch", "cuda", "triton", "packages")
    return bool(versions(one.environment) == versions(other.environment))
