"""Equal kernels, timed as badly as it gets, from samples to verdicts: beside a control, few are called different."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.unit.fabricated import Fabricate, verdicts
from tests.unit.judge.timings import Samples, correlated, drifting, independent

from flashmoe_science.judge.summary import groups

Make = Callable[..., Samples]
PROBLEMS, PAIRS, NOISE = 120, 24, 0.1


@pytest.mark.parametrize("make", [independent, correlated, drifting], ids=lambda make: make.__name__)
def test_in_a_run_few_are_called_different(make: Make) -> None:
    """The noise is several times the margin, so that the margin does not answer for the interval."""
    rng, run, rows = np.random.default_rng(31), Fabricate(), []
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
