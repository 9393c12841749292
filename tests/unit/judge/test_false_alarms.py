"""Equal kernels, timed as badly as it gets, from samples to verdicts: with the control beside them, few are called different.

The noise is several times the margin, so that the margin does not answer for the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.summary import groups

Floats = NDArray[np.float64]
PROBLEMS, PAIRS, NOISE = 200, 24, 0.1
TIME = 20_000.0


def independent(rng: np.random.Generator) -> Floats:
    return TIME * np.exp(NOISE * rng.standard_normal((2, PAIRS)))


def correlated(rng: np.random.Generator) -> Floats:
    """Each pair's ratio follows the one before (0.6)."""
    steps = rng.standard_normal(PAIRS + 30)
    for index in range(1, len(steps)):
        steps[index] += 0.6 * steps[index - 1]
    return np.asarray([np.full(PAIRS, TIME), TIME * np.exp(NOISE * 0.8 * steps[30:])])


def drifting(rng: np.random.Generator) -> Floats:
    """The clock slows by a fifth while A B B A is taken."""
    moments = 1 + 0.2 * np.arange(2 * PAIRS).reshape(PAIRS, 2) / (2 * PAIRS)
    moments[1::2] = moments[1::2, ::-1]
    return independent(rng) * moments.T


def quantised(rng: np.random.Generator) -> Floats:
    """Readings on a grid of a fortieth of the time."""
    return np.round(independent(rng) / 500) * 500


@pytest.mark.parametrize("make", [independent, correlated, drifting, quantised], ids=lambda make: make.__name__)
def test_equals_are_seldom_called_different(
    fabricate: Callable[..., Any], make: Callable[[np.random.Generator], Floats]
) -> None:
    rng = np.random.default_rng(31)
    run = fabricate()
    for size in range(1, PROBLEMS + 1):
        problem = f"attn b1 h1 q{size} d64 fp16"
        run.control(problem=problem).timed("fwd_triton", TIME, "fa3", TIME, problem=problem, pairs=PAIRS)
    rows = []
    for row in run.rows:
        if row.kind == "timing":
            a, b = (np.maximum(make(rng), 1)).round().astype(int).tolist()
            row = row.model_copy(update={"a": a, "b": b})
        rows.append(row)
    run.rows = rows
    (group,) = groups(verdicts([run.done()]))
    assert (group.counts["faster"] + group.counts["slower"]) / PROBLEMS < 0.05
    assert group.counts["refused"] / PROBLEMS < 0.02  # by a control that chance does not explain
    assert group.counts["undecided"] / PROBLEMS > 0.9
    assert group.sure == {"faster": 0, "slower": 0}
    widest = max(math.log(row.high / row.low) for row in group.rows if row.low and row.high)
    assert widest > math.log(1.02)
