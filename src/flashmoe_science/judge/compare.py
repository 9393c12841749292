"""Versions side by side: time, ratio with interval, correctness and resources, on the places that they share.

A place is a problem on a GPU, a clock and a cache: times of different ones are never compared. How far a ratio can be believed
depends on how the two were sampled, which ``how`` says:

- "paired": side by side, in one run, on the same inputs;
- "through NAME": each beside the same rival, in two runs or in one. What slowed the machine slowed the rival too and cancels.

Where there is neither, the times stand side by side without a ratio: a machine in another state would shift it unseen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.multiple_testing import Named, named
from flashmoe_science.judge.selectors import Entry, Place, Version
from flashmoe_science.judge.standing import JudgedRun, precedence
from flashmoe_science.judge.stats import MIN_PAIRS, Call, Interval, call, geometric_mean, quotient
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Cache, Clock, CorrectnessRow, SeenLaunch

USERS_OWN = "sdpa"  # what a PyTorch user has without us


class CannotCompareError(ValueError):
    """Versions that share no place, said in one line: what each has."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One version in one place; ``verdict`` is None where it has nothing there. ``over_first`` is its speed-up over the first
    version (above 1 it is faster), taken as ``how`` says; ``over_sdpa`` that over PyTorch's own in its own run. ``oracle`` is
    None where it was not held against the oracle; ``launches`` are those of one call."""

    verdict: Verdict | None
    oracle: CorrectnessRow | None = None
    launches: Sequence[SeenLaunch] = ()
    over_first: Interval | None = None
    how: str | None = None
    over_sdpa: Interval | None = None

    @property
    def said(self) -> Call | None:
        """The speed-up over the first version in a word; None where too few samples decide."""
        return call(self.over_first) if self.over_first is not None and self.over_first.pairs >= MIN_PAIRS else None

    @property
    def largest(self) -> SeenLaunch | None:
        """The launch with the most threads."""
        return max(self.launches, key=lambda one: math.prod(one.block) * math.prod(one.grid), default=None)


@dataclass(frozen=True, slots=True)
class Summary:
    """A version against the first one, over the problems of one GPU, clock and cache. ``told`` names rows after Holm."""

    label: str
    gpu: str
    clock: Clock
    cache: Cache
    mean: Interval
    told: Named


@dataclass(frozen=True, slots=True)
class SideBySide:
    """``rows`` holds a cell a version, in the order of ``labels``. ``alone`` counts the places that only one version has."""

    labels: tuple[str, ...]
    rows: Mapping[Place, tuple[Cell, ...]]
    summaries: tuple[Summary, ...]
    alone: Mapping[str, int]


def compare(versions: Sequence[Version], problem: str | None = None) -> SideBySide:
    """Every version beside the first, wherever the first and at least one other have been; on one problem, where it is given.

    A run is judged whole whatever is asked of it: what its controls can be believed depends on how many there are. Raises
    CannotCompareError: fewer than two versions; one that shares no GPU, problem, clock or cache with the first."""
    labels = tuple(version.label for version in versions)
    if len(versions) < 2:
        raise CannotCompareError("there is one version alone; a comparison needs at least 2")
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise CannotCompareError(f"version {twice[0]!r} stands twice; there is nothing to compare it with")
    entries = [{at: found for at, found in one.entries().items() if problem in (None, at.problem)} for one in versions]
    for label, places in zip(labels[1:], entries[1:], strict=True):
        _refuse_apart(labels[0], entries[0], label, places)
    everywhere = Counter(place for places in entries for place in places)
    rows = {place: _row([places.get(place, []) for places in entries]) for place in entries[0] if everywhere[place] > 1}
    alone = {label: sum(everywhere[place] == 1 for place in places) for label, places in zip(labels, entries, strict=True)}
    return SideBySide(labels, rows, tuple(_summaries(labels, rows)), alone)


def _refuse_apart(a: str, places_a: Mapping[Place, object], b: str, places_b: Mapping[Place, object]) -> None:
    """Say in what two versions differ that share no place."""
    for label, places in ((a, places_a), (b, places_b)):
        if not places:
            raise CannotCompareError(f"{label} has no verdict on what was asked for")
    for upto, what in ((1, "GPU"), (2, "problem"), (3, "clock"), (4, "cache")):
        has_a, has_b = ({place[:upto] for place in places} for places in (places_a, places_b))
        if not has_a & has_b:
            one, other = sorted(has_a)[0][-1], sorted(has_b)[0][-1]
            raise CannotCompareError(
                f"{a} and {b} have no {what} in common ({one!r} and {other!r}, say); "
                f"times of different {'caches' if what == 'cache' else what + 's'} are not compared"
            )


def _row(candidates: Sequence[Sequence[Entry]]) -> tuple[Cell, ...]:
    """A cell a version: of one run where that has all versions, else of the run that counts for each version."""
    common = set.intersection(*({id(entry.judged) for entry in entries} for entries in candidates if entries))
    chosen: list[Entry | None] = []
    for entries in candidates:
        able = [entry for entry in entries if id(entry.judged) in common] or entries
        able = [entry for entry in able if entry.verdict.time_ns is not None] or able
        chosen.append(max(able, key=lambda entry: precedence(entry.verdict), default=None))
    return tuple(_cell(entry, chosen[0] if place else None) for place, entry in enumerate(chosen))


def _cell(entry: Entry | None, first: Entry | None) -> Cell:
    if entry is None:
        return Cell(verdict=None)
    ratio, how = _over(first, entry) if first is not None else (None, None)
    return Cell(
        verdict=entry.verdict,
        oracle=entry.judged.error(entry.verdict),
        launches=entry.judged.launches(entry.verdict),
        over_first=ratio,
        how=how,
        over_sdpa=next((c.interval for c in entry.judged.beside(entry.verdict) if c.rival == USERS_OWN), None),
    )


def _over(first: Entry, entry: Entry) -> tuple[Interval | None, str | None]:
    """Speed-up of ``entry`` over ``first``, by the best way there is, and which that was."""
    if first.verdict.time_ns is None or entry.verdict.time_ns is None:
        return None, None
    same = (first.judged.run.header.run, first.verdict.kernel, first.verdict.config)
    if same == (entry.judged.run.header.run, entry.verdict.kernel, entry.verdict.config):
        return None, "the same samples"
    if first.judged is entry.judged:
        for pair in entry.judged.beside(entry.verdict):
            if (pair.rival, pair.rival_config) == (first.verdict.kernel, first.verdict.config):
                return pair.interval, "paired"
    # The ratio of both ratios to a rival that ran the same in both runs; of several, the one that leaves the least open.
    met = {
        (pair.rival, pair.rival_config): pair
        for pair in first.judged.beside(first.verdict)
        if _is_same_there(pair, first.judged, entry.judged)
    }
    found = [
        (quotient(pair.interval, met[pair.rival, pair.rival_config].interval), f"through {pair.rival}")
        for pair in entry.judged.beside(entry.verdict)
        if (pair.rival, pair.rival_config) in met
    ]
    return min(found, key=lambda one: one[0].half_width, default=(None, None))


def _is_same_there(pair: Comparison, a: JudgedRun, b: JudgedRun) -> bool:
    """Whether a rival is the same code in both runs: a peer by the versions of what brings it, ours by its source."""
    one, other = a.run.header, b.run.header
    if one.run == other.run:
        return True
    if pair.rival_origin != "peer":
        return pair.rival_origin == "ours" and one.source_digest == other.source_digest
    known = [(e.torch, e.cuda, e.triton, e.packages) for e in (one.environment, other.environment)]
    return known[0] == known[1]


def _summaries(labels: Sequence[str], rows: Mapping[Place, tuple[Cell, ...]]) -> list[Summary]:
    found: dict[tuple[str, Clock, Cache, int], list[Cell]] = defaultdict(list)
    for (gpu, _, clock, cache), row in rows.items():
        for index, cell in enumerate(row):
            if cell.over_first is not None:
                found[gpu, clock, cache, index].append(cell)
    summaries = []
    for (gpu, clock, cache, index), cells in found.items():
        ratios = [cell.over_first for cell in cells if cell.over_first is not None]
        summaries.append(Summary(labels[index], gpu, clock, cache, geometric_mean(ratios), named(ratios)))
    return summaries
