"""Multiple testing: which claims over many rows must be corrected for their number, and by how much.

With 36 rows, each judged at 95%, it is more likely than not that one row is wrong. Whether that matters depends on the claim:

- "faster on every problem" needs **no** correction. The claim is false only if some row is not faster, and then passes only if
  that row errs: 2.5% at most, however many rows there are (an intersection-union test; Berger, 1982).
- "faster on some problem", and any flag that one row of many can raise ("slower here", "regressed here"), needs the full
  correction: each row is one more chance to err.
- Naming the rows that are faster, or slower, is many claims at once: Holm's (1979) step-down procedure keeps the probability
  that any of the named rows is wrong under 5%, however the rows depend on each other.
- A geometric mean is one number, and one interval.

The decision is ``docs/design/0008-many-rows.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_science.judge.stats import Interval

_ERROR = 0.05  # of a family of rows, together


def holm(p_values: Sequence[float]) -> list[bool]:
    """Which hypotheses are rejected when the probability of rejecting any true one is to stay under 5%."""
    rejected = [False] * len(p_values)
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        if p_values[place] > _ERROR / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


def named(rows: Sequence[Interval], ratio: float = 1.0) -> tuple[list[int], list[int]]:
    """The indices of the rows proven to be above ``ratio``, and of those proven below, by Holm's procedure over both directions
    at once, two hypotheses a row: the probability that any of the rows is wrong is 5% at most."""
    rejected = holm([row.p_above(ratio) for row in rows] + [row.p_below(ratio) for row in rows])
    above, below = rejected[: len(rows)], rejected[len(rows) :]
    return [place for place, proven in enumerate(above) if proven], [place for place, proven in enumerate(below) if proven]


def least(rows: Sequence[Interval]) -> Interval:
    """The smallest of rows' ratios. Its ``low`` needs no correction for the number of rows (it is too high only if that of the
    truly smallest row is), its ``high`` needs the full correction (an error of any row makes it too low)."""
    among = [row.among(len(rows)) for row in rows]
    return Interval(
        ratio=min(row.ratio for row in rows),
        low=min(row.low for row in rows),
        high=min(row.high for row in among),
        pairs=sum(row.pairs for row in rows),
    )


def most(rows: Sequence[Interval]) -> Interval:
    """The largest of rows' ratios: the mirror image of ``least``."""
    return least([row.flipped() for row in rows]).flipped()
