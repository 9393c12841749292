"""The ratchet: the best measured ratios. A proven regression fails, noise does not, a proven gain raises an entry.

An entry is a ratio to a named rival on one problem, GPU, clock and cache: a time would follow the machine's state, and the
ratio to the best peer would fall when a peer gets better. Its ``subject`` is "ours", the fastest of our kernels there, or a
user's kernel, by name. Each interval is widened for the number of entries compared (``Interval.among``), and a ratio must move
by more than the ratios of two runs of the same code differ. The file is JSON, sorted, an entry a line, checked as foreign data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.formats import with_interval
from flashmoe_science.judge.gate.entries import SCHEMA, Entry, EntryError, entries_as_text, read_entries
from flashmoe_science.judge.standing import JudgedRun, is_drawn, latest
from flashmoe_science.judge.stats import MARGIN, MIN_PAIRS, Interval
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Cache, Clock
from flashmoe_science.store import write_whole

OURS = "ours"
Ratio = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Key(NamedTuple):
    """The key of an entry; entries are sorted by it."""

    gpu: str
    problem: str
    clock: Clock
    cache: Cache
    subject: str

    @property
    def words(self) -> str:
        whose = "" if self.subject == OURS else f"{self.subject} on "
        return f"{whose}{self.problem} ({self.gpu}, {self.clock} clock, {self.cache} cache)"


class Accepted(Entry):
    """A deliberate lowering: why, and what was kept before."""

    reason: Annotated[str, Field(min_length=1)]
    from_ratio: Ratio
    from_run: str


class Kept(Entry):
    """The best ratio of one place: the rival's time over the kernel's, with its 95% interval, and the run it rests on."""

    gpu: str
    problem: str
    clock: Clock
    cache: Cache
    subject: str
    rival: str
    ratio: Ratio
    low: Ratio
    high: Ratio
    kernel: str
    config: str
    run: str
    torch: str | None
    accepted: Accepted | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.low <= self.ratio <= self.high:
            raise ValueError(f"ratio is {self.ratio:g}, which is not within {self.low:g} to {self.high:g}")
        written = str(parse_problem(self.problem))
        if self.problem != written:
            raise ValueError(f"problem is {self.problem!r}; it must be written {written!r}")
        return self

    @property
    def key(self) -> Key:
        return Key(self.gpu, self.problem, self.clock, self.cache, self.subject)


Outcome = Literal["held", "gained", "regressed", "refused", "absent", "new"]
# In nine of ten pairs of runs on an H200, the ratio of two peers, whose code is unchanged, moves by no more than this
# (docs/notes/ratchet.md). The host's state slows two programs by different factors.
MOVES: dict[Clock, float] = {"graph": MARGIN, "eager": 0.2}
ALL = "all"
_USERS_OWN = "sdpa"  # the rival of a new entry, where it was timed: every machine has it


def read_ratchet(path: Path) -> list[Kept]:
    """The entries of a file. Raises EntryError: no such file; one that is torn, newer, or holds anything but whole and
    possible entries, each once."""
    if not path.exists():
        raise EntryError(f"{path} does not exist; flashmoe ratchet --update makes it from the records")
    return read_entries(path, "JSON", "entries", Kept, lambda kept: kept.key)


def write_ratchet(path: Path, kept: Iterable[Kept]) -> None:
    """Write the entries, sorted, in one step: a reader sees the old file or the new one. Raises OSError if it cannot."""
    entries = [one.model_dump(exclude=None if one.accepted else {"accepted"}) for one in sorted(kept, key=lambda one: one.key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, entries_as_text(SCHEMA, entries))


@dataclass(frozen=True, slots=True)
class Check:
    """An entry compared with what is measured now. ``kept`` is None for a new place, ``now`` where there is no number."""

    outcome: Outcome
    kept: Kept | None
    now: Comparison | None
    torch: str | None = None  # of the run that counts now
    why: str | None = None

    @property
    def key(self) -> Key:
        if self.kept is None:
            assert self.now is not None  # what is not kept was measured
            return _place(self.now)
        return self.kept.key

    def as_dict(self, kept: Kept | None) -> dict[str, Any]:
        """Plain values for JSON; ``kept`` is the entry that the file holds afterwards."""
        now = self.now
        return {
            **self.key._asdict(),
            "outcome": self.outcome,
            "rival": self.kept.rival if self.kept else now and now.rival,
            "before": self.kept and self.kept.model_dump(),
            "now": now and {**now.interval.ends, "kernel": now.kernel, "run": now.run},
            "kept": kept and kept.model_dump(),
            "why": self.why,
        }


def check(kept: Sequence[Kept], runs: Sequence[JudgedRun], recorded: Sequence[JudgedRun]) -> list[Check]:
    """Every entry compared with the run that counts for it, then places without an entry. ``runs`` are what was measured now,
    ``recorded`` those that the entries rest on, to verify these. Raises EntryError: an entry's ratio is not its run's."""
    standing = _standing(runs)
    of_rival = {rival: _standing([one for one in runs if rival in one.kernels]) for rival in {one.rival for one in kept}}
    judged = {one.key: _counting(one.key, standing, of_rival[one.rival]) for one in kept}
    now = {one.key: _against(_pairs(judged[one.key], one.key), one.rival) for one in kept}
    compared = sum(pair is not None for pair in now.values())
    checks = [_check(one, _trusted(one, recorded), now[one.key], compared, judged[one.key]) for one in kept]
    for key, run in standing.items():
        if key not in now and (pair := _first(_pairs(run, key))) is not None:
            checks.append(Check("new", None, pair, run.run.header.environment.torch))
    return checks


def raised(kept: Sequence[Kept], checks: Sequence[Check]) -> list[Kept]:
    """The entries updated by proven gains and new problems. A quick run raises nothing."""
    entries = {one.key: one for one in kept}
    for one in checks:
        if one.outcome in ("gained", "new") and one.now is not None and not one.now.quick:
            entries[one.key] = _entry(one.now, one.torch, one.key)
    return list(entries.values())


def lowered(kept: Sequence[Kept], checks: Sequence[Check], problem: str, reason: str) -> list[Kept]:
    """All entries, with those of one problem, or of ALL, that have regressed lowered to what is measured now, for that reason.
    Raises EntryError: none has regressed, or only a quick run measured it."""
    entries = {one.key: one for one in kept}
    found = [one for one in checks if one.outcome == "regressed" and problem in (ALL, one.key.problem)]
    if not found:
        raise EntryError(f"--accept is {problem!r}, which has not regressed; there is nothing to lower")
    for one in found:
        assert one.now is not None  # what has regressed was measured
        if one.now.quick:
            raise EntryError(f"--accept is {problem!r}, which only a quick run measured; measure it in full to lower it")
        before = entries[one.key]
        accepted = Accepted(reason=reason, from_ratio=before.ratio, from_run=before.run)
        entries[one.key] = _entry(one.now, one.torch, one.key).model_copy(update={"accepted": accepted})
    return list(entries.values())


def _check(kept: Kept, before: Interval, now: Comparison | None, compared: int, judged: JudgedRun | None) -> Check:
    """One entry compared with its pair now; ``judged`` is the run that counts for its place, None where there is none."""
    if judged is None:
        return Check("absent", kept, None, why="no run here measured it")
    torch = judged.run.header.environment.torch
    if now is None:
        return Check("refused", kept, None, torch, _refusal(kept, judged))
    interval = now.interval
    if interval.pairs < MIN_PAIRS:
        return Check("refused", kept, None, torch, f"{interval.pairs} pairs of samples; {MIN_PAIRS} are the least that decide")
    among = interval.among(compared)
    words = with_interval(interval.ratio, among.low, among.high) + f" of {kept.rival} by {now.kernel}, run {now.run}"
    least = 1 + MOVES[kept.clock]
    if among.high < before.low / least:
        moved = "" if torch == kept.torch else f"; the rival's PyTorch was {kept.torch}, and is {torch}"
        was = with_interval(before.ratio, before.low, before.high)
        return Check("regressed", kept, now, torch, f"{words}; {was} is kept{moved}")
    return Check("gained" if among.low > before.high * least and not now.quick else "held", kept, now, torch, words)


def _standing(runs: Sequence[JudgedRun]) -> dict[Key, JudgedRun]:
    """The run that counts for each place. Of problems drawn at random nothing is kept: no later run measures them again."""
    by_id = {judged.run.header.run: judged for judged in runs if not is_drawn(judged.run.header.suite)}
    rows = (row for judged in by_id.values() for row in judged.verdicts if row.of_ours or row.origin == "candidate")
    return {key: by_id[row.run] for key, row in latest(rows, _place).items()}


def _counting(key: Key, standing: Mapping[Key, JudgedRun], of_rival: Mapping[Key, JudgedRun]) -> JudgedRun | None:
    """The run that counts for an entry: the latest that measured its rival, unless a later run refuses the kernel."""
    latest_run = standing.get(key)
    rows = [] if latest_run is None else [row for row in latest_run.verdicts if _place(row) == key]
    return of_rival.get(key, latest_run) if any(row.time_ns is not None for row in rows) else latest_run


def _pairs(judged: JudgedRun | None, key: Key) -> list[Comparison]:
    return [] if judged is None else [pair for pair in judged.believed if _place(pair) == key]


def _place(row: Verdict | Comparison) -> Key:
    return Key(row.gpu, row.problem, row.clock, row.cache, OURS if row.origin == "ours" else row.kernel)


def _first(pairs: Iterable[Comparison]) -> Comparison | None:
    """The pair to keep in a place without an entry: against sdpa, else of the fastest config against its best peer."""
    against = [pair for pair in pairs if pair.rival_origin == "peer"]
    return _against(against, _USERS_OWN) or min(against, key=lambda pair: (pair.time_ns, pair.interval.ratio), default=None)


def _against(pairs: Iterable[Comparison], rival: str) -> Comparison | None:
    return min((pair for pair in pairs if pair.rival == rival), key=lambda pair: pair.time_ns, default=None)


def _trusted(kept: Kept, recorded: Sequence[JudgedRun]) -> Interval:
    """The entry's interval, from the samples of its run where that is among ``recorded``, else as written. Raises EntryError:
    the run gives another ratio, or none."""
    judged = next((one for one in recorded if one.run.header.run == kept.run), None)
    if judged is None:
        return Interval(kept.ratio, kept.low, kept.high, pairs=0)
    wanted = (kept.key, kept.kernel, kept.config, kept.rival)
    pairs = (pair for pair in judged.believed if (_place(pair), pair.kernel, pair.config, pair.rival) == wanted)
    interval = next((pair.interval for pair in pairs), None)
    if interval is None:
        raise EntryError(f"the entry of {kept.key.words} rests on run {kept.run}, which has no such pair to believe")
    if abs(interval.ratio / kept.ratio - 1) > 1e-4:
        raise EntryError(f"the entry of {kept.key.words} says {kept.ratio:g}; run {kept.run} gives {interval.ratio:.5g}")
    return interval


def _refusal(kept: Kept, judged: JudgedRun) -> str:
    """Why the run that counts for an entry's place has no number for it."""
    rows = [row for row in judged.verdicts if _place(row) == kept.key]
    refused = next((row.reason for row in rows if row.verdict == "refused"), None)
    return refused or f"{kept.rival} was not timed beside {' or '.join(row.kernel for row in rows)}"


def _entry(pair: Comparison, torch: str | None, key: Key) -> Kept:
    """The entry as it is written: with six significant digits."""
    interval = pair.interval
    numbers = {name: float(f"{value:.6g}") for name, value in interval.ends.items()}
    names = {"rival": pair.rival, "kernel": pair.kernel, "config": pair.config, "run": pair.run, "torch": torch}
    return Kept.model_validate(key._asdict() | numbers | names)
