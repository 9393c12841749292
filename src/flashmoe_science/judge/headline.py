"""What is said first of one kernel on one problem, where several clocks and caches have a verdict each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import times
from flashmoe_science.judge.verdicts import Verdict

_OPPOSITE: dict[str, str] = {"faster": "slower", "slower": "faster"}
_BY: dict[str, str] = {"graph": "by device time", "eager": "as a caller waits"}


@dataclass(frozen=True, slots=True)
class Headline:
    """``verdict`` is the one that leads: on the device's clock where there is one, cold before warm. ``against`` is the other
    clock's where that says the opposite; then neither alone is what to say."""

    verdict: Verdict
    against: Verdict | None

    @property
    def words(self) -> str:
        """The verdict and its ratio, or both ratios where the clocks disagree."""
        if self.against is None:
            number = "" if self.verdict.ratio is None else f", {times(self.verdict.ratio)} of {self.verdict.rival}"
            return f"{self.verdict.label}{number}"
        said = (f"{one.verdict} {_BY[one.clock]} ({times(one.ratio)} of {one.rival})" for one in (self.verdict, self.against))
        return f"the clocks disagree: {', '.join(said)}"


def headline(rows: Sequence[Verdict]) -> Headline:
    """What to say first of these verdicts, which are of one kernel on one problem and GPU. Raises ValueError for no verdict."""
    first, *others = sorted(rows, key=lambda row: (row.ratio is None, row.clock != "graph", row.cache != "cold"))
    opposite = _OPPOSITE.get(first.verdict, "")
    return Headline(first, next((row for row in others if row.clock != first.clock and row.verdict == opposite), None))


def disagreements(rows: Iterable[Verdict]) -> list[Headline]:
    """The headlines of those kernels and problems, within a GPU, suite and run, on which the clocks say the opposite."""
    groups: dict[tuple[str, str, str, str, str], list[Verdict]] = defaultdict(list)
    for row in rows:
        groups[row.gpu, row.suite, row.run, row.problem, row.kernel].append(row)
    return [found for found in map(headline, groups.values()) if found.against is not None]
