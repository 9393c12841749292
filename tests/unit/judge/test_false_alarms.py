"""Equal kernels, timed as badly as it gets, are seldom called different: a row by itself, a run, and many rows together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.judge.timings import Samples, correlated, drifting, few, independent, quantised

from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.stats import call, ratio_interval
from flashmoe_science.judge.summary import groups

Make = Callable[..., Samples]
PROBLEMS, PAIRS, NOISE = 120, 24, 0.1
ROWS, POOL, SUITES = 36, 1000, 4000


def named(make: Make) -> str:
    return make.__name__


@pytest.mark.parametrize("make", [independent, correlated, drifting], ids=named)
def test_in_a_run_few_are_called_different(fabricate: Callable[..., Any], make: Make) -> None:
    """The noise is several times the margin, so that the margin does not answer for the interval."""
    rng, run, rows = np.random.default_rng(31), fabricate(), []
    for size in range(1, PROBLEMS + 1):
        problem = f"attn b1 h1 q{size} d64 fp16"
        run.control(problem=problem).timed("fwd_triton", 20_000, "fa3", 20_000, problem=problem, pairs=PAIRS)
    for row in run.rows:
        if row.kind == "timing":
            a, b = make(rng, noise=NOISE, pairs=PAIRS)
            row = row.model_copy(update={"a": a, "b": b})
        rows.append(row)
    run.rows = rows
    (group,) = groups(verdicts([run.done()]))
    assert (group.counts["faster"] + group.counts["slower"]) / PROBLEMS < 0.05
    assert group.counts["refused"] / PROBLEMS < 0.02  # by a control that chance does not explain
    assert group.counts["undecided"] / PROBLEMS > 0.9
    assert group.sure == {"faster": 0, "slower": 0}
    assert max(math.log(row.high / row.low) for row in group.rows if row.low and row.high) > math.log(1.02)


@pytest.mark.parametrize("make", [few, correlated, drifting, quantised], ids=named)
def test_rows_of_a_suite_err_together_less_than_one_time_in_twenty(make: Make) -> None:
    """Family-wise: the share of suites of 36 equal rows of which any is named faster or slower, or has an end beyond 1."""
    rng = np.random.default_rng(21)
    pool = [ratio_interval(*make(rng), 500.0 if make is quantised else 1.0) for _ in range(POOL)]
    suites = rng.integers(0, POOL, (SUITES, ROWS))
    smallest = np.array([min(one.p_above(1.0), one.p_below(1.0)) for one in pool])[suites].min(axis=1)
    assert np.mean(smallest <= 0.05 / (2 * ROWS)) < 0.05  # where Holm names a row
    assert np.mean(smallest <= 0.025) > 0.3 or make is quantised  # which is why it is corrected
    missed = np.array([not one.low <= 1 <= one.high for one in (each.among(ROWS) for each in pool)])
    assert np.mean(missed[suites].any(axis=1)) < 0.05
    if make in (correlated, drifting):
        calls = [call(one) for one in pool]
        assert sum(verdict in ("faster", "slower") for verdict in calls) / POOL < 0.05
        assert calls.count("equivalent") > POOL / 2
